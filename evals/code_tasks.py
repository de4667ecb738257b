"""Scoring of the tasks that run what the model wrote: does its program pass the tests?

`process_results` of the task files; the harness's own metric would run programs in its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.sandbox import run_program


def humaneval(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The prompt's function, completed, against HumanEval(+)'s `check`."""
    checks = f"{document['test']}\ncheck({document['entry_point']})\n"
    return _pass_at_1(f"{document['prompt']}{results[0]}\n{checks}")


def mbpp_plus(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """A whole program against MBPP+'s extended tests."""
    return _pass_at_1(f"{results[0]}\n{document['test']}\n")


def mbpp(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """A whole program against MBPP's assertions."""
    parts = [document["test_setup_code"], results[0], *document["test_list"]]
    return _pass_at_1("\n".join(parts) + "\n")


def _pass_at_1(program: str) -> dict[str, float]:
    return {"pass_at_1": float(run_program(program).passed)}


def mbpp_shots() -> list[dict[str, Any]]:
    """Examples before an MBPP question: three short ones of our own, in MBPP's form."""
    examples = (
        ("Write a function to find the sum of the even numbers of a list.", "sum_even(numbers)",
         "sum(number for number in numbers if number % 2 == 0)",
         ("sum_even([1, 2, 3, 4]) == 6", "sum_even([]) == 0", "sum_even([7]) == 0")),
        ("Write a function to reverse the order of the words of a text.", "reverse_words(text)",
         "' '.join(reversed(text.split()))",
         ("reverse_words('a b c') == 'c b a'", "reverse_words('one') == 'one'",
          "reverse_words('') == ''")),
        ("Write a function to count how often a value occurs in a tuple.", "count_value(items, x)",
         "items.count(x)",
         ("count_value((1, 2, 1), 1) == 2", "count_value((), 5) == 0",
          "count_value((3, 3, 3), 3) == 3")),
    )  # fmt: skip
    return [
        {
            "text": text,
            "prompt": text,
            "code": f"def {head}:\n    return {body}",
            "test_list": [f"assert {test}" for test in tests],
            "is_fewshot": True,
        }
        for text, head, body, tests in examples
    ]
