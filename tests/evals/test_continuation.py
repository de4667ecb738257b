"""What a fair continuation question is."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from evals.continuation import Lengths, Question, make_questions, write_questions

LENGTHS = Lengths(context=200, min_context=80, span=60)


def lines(name: str, count: int) -> str:
    """A document whose every line is unique."""
    return "\n".join(
        f"{name} line {i} says {i * i} and then {i * 7919 % 1000}" for i in range(count)
    )


def document(text: str, reserved: bool = False) -> dict:
    return {"text": text, "reserved": reserved}


def corpus() -> dict[str, list[dict]]:
    return {
        "code": [document(lines(f"code{i}", 60)) for i in range(5)],
        "prose": [document(lines(f"prose{i}", 40)) for i in range(3)] + [document("short")],
        "mathematics": [document(lines(f"sum{i}", 40), reserved=i % 2 == 1) for i in range(6)],
    }


def questions(num: int = 30, seed: int = 0) -> list[Question]:
    return make_questions(corpus(), num, seed, LENGTHS)[0]


def text_of(question: Question) -> str:
    return corpus()[question.domain][question.document]["text"]


def test_the_answer_is_what_follows_the_context_in_its_document() -> None:
    for question in questions():
        assert question.context + question.choices[question.answer] in text_of(question)


def test_all_choices_are_of_the_same_document_and_length_and_unlike() -> None:
    for question in questions():
        assert len(set(question.choices)) == 4
        assert all(choice in text_of(question) for choice in question.choices)
        assert {len(choice) for choice in question.choices} == {LENGTHS.span}


def test_no_choice_overlaps_the_context_or_another_choice() -> None:
    for question in questions():  # each line is unique, so that a span's place can be found
        text = text_of(question)
        places = [text.index(question.context)] + [text.index(c) for c in question.choices]
        sizes = [len(question.context)] + [LENGTHS.span] * 4
        ends = sorted(zip(places, sizes, strict=True))
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ends))


def test_context_and_choices_begin_at_line_starts() -> None:
    for question in questions():
        text = text_of(question)
        for span in (question.context, *question.choices):
            place = text.index(span)
            assert place == 0 or text[place - 1] == "\n"


def test_a_document_of_few_lines_is_cut_at_sentences() -> None:
    text = " ".join(f"Sentence {i} tells about {i * 7919 % 1000} things." for i in range(60))
    made, _ = make_questions({"prose": [document(text)]}, 3, 0, LENGTHS)
    assert len(made) == 3
    for question in made:
        assert all(choice.startswith("Sentence") for choice in question.choices)


def test_the_context_keeps_within_its_limits() -> None:
    sizes = [len(question.context) for question in questions()]
    assert min(sizes) >= LENGTHS.min_context
    assert max(sizes) <= LENGTHS.context


def test_only_reserved_documents_are_asked_about_where_a_source_has_any() -> None:
    asked = {q.document for q in questions(60) if q.domain == "mathematics"}
    assert asked == {1, 3, 5}


def test_questions_spread_evenly_over_domains_and_their_documents() -> None:
    made = questions(30)
    assert Counter(q.domain for q in made) == {"code": 10, "prose": 10, "mathematics": 10}
    assert set(Counter(q.document for q in made if q.domain == "code").values()) == {2}


def test_answers_are_spread_evenly_over_the_places() -> None:
    counts = Counter(question.answer for question in questions(60))
    assert max(counts.values()) - min(counts.values()) <= 3  # one a domain


def test_short_documents_are_left_out_and_counted() -> None:
    made, too_short = make_questions(corpus(), 30, 0, LENGTHS)
    assert too_short == {"code": 0, "prose": 1, "mathematics": 0}
    assert all(q.document != 3 for q in made if q.domain == "prose")


def test_documents_that_repeat_themselves_give_no_question() -> None:
    made, _ = make_questions({"code": [document("the very same line again\n" * 60)]}, 5, 0, LENGTHS)
    assert made == []


def test_a_small_domain_gives_what_it_has_and_spans_of_one_document_do_not_repeat() -> None:
    made, _ = make_questions({"code": [document(lines("code", 40))]}, 1000, 0, LENGTHS)
    assert 5 < len(made) < 40
    assert len({question.choices[question.answer] for question in made}) == len(made)


def test_deterministic_by_seed_and_independent_of_other_domains() -> None:
    assert questions(seed=1) == questions(seed=1) != questions(seed=2)
    alone, _ = make_questions({"prose": corpus()["prose"]}, 10, 0, LENGTHS)
    assert alone == [q for q in questions(30) if q.domain == "prose"]


def test_written_questions_read_back(tmp_path: Path) -> None:
    made = [Question("code", 1, 'a "quoted"\nüber', ("w", "x", "y", "z"), 2)]
    write_questions(made, tmp_path / "q.jsonl")
    (line,) = (tmp_path / "q.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "domain": "code",
        "document": 1,
        "context": 'a "quoted"\nüber',
        "choices": ["w", "x", "y", "z"],
        "answer": 2,
    }


@pytest.mark.parametrize("num", [1, 2, 4])
def test_shares_of_an_uneven_total_differ_by_at_most_one(num: int) -> None:
    counts = Counter(q.domain for q in questions(num))
    assert counts.total() == num
    assert max(counts.values()) - min(counts.get(d, 0) for d in corpus()) <= 1
