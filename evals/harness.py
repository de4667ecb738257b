"""Run lm-evaluation-harness tasks on a model: ours, from local files, or the harness's own.

The harness is imported only here, when a task runs (it takes 2 s).
"""

from __future__ import annotations

import io
import json
import logging
import operator
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from model import HybridModel

TASKS = Path(__file__).parent / "tasks"


def own_tasks() -> list[str]:
    """The names of the tasks that need no download; each wants a file of questions."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def run_tasks(
    model: HybridModel,
    tokenizer: Tokenizer,
    eos_id: int,
    tasks: Sequence[str],
    folder: Path,
    *,
    questions: Mapping[str, Path],
    max_length: int,
    batch_size: int = 32,
    num_fewshot: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate tasks; write every sample to `<folder>/<task>_samples.jsonl`.

    Args:
        tasks: names of `own_tasks`, or of the harness's (those download their data).
        questions: the JSONL file of each own task.
        max_length: positions that the model sees at most; longer contexts lose their beginning.
        num_fewshot: None: as the task says.

    Returns:
        For each task `accuracy`, `accuracy_norm` (per byte; where the task has it),
        `standard_error`, `num_samples`, `num_fewshot`, `version`, and `metrics`: every metric of
        the harness by its own name, `_stderr` and filters included.

    Raises:
        ValueError: for a task that the harness does not know, or a text too long for the model.
    """
    offline = set(tasks) <= set(questions)
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _quiet(), tempfile.TemporaryDirectory() as cache:
        from lm_eval import evaluator
        from lm_eval.tasks import TaskManager

        from evals.adapter import HarnessModel

        # It asks git about the working folder, which complains where that is no repository.
        evaluator.get_git_commit_hash = lambda: None
        manager = TaskManager(include_path=str(TASKS), include_defaults=not offline)
        _check_names(tasks, manager.all_tasks)
        was_training = model.training
        outcome = evaluator.simple_evaluate(
            model=HarnessModel(model.eval(), tokenizer, eos_id, max_length, batch_size),
            tasks=[_specification(name, questions, cache) for name in tasks],
            task_manager=manager,
            num_fewshot=num_fewshot,
            bootstrap_iters=100,
            random_seed=None,  # type: ignore[arg-type]  # leave the process's generators alone
            numpy_random_seed=None,  # type: ignore[arg-type]
            torch_random_seed=None,  # type: ignore[arg-type]
        )
        model.train(was_training)
    for name, samples in outcome["samples"].items():
        _write_samples(samples, folder / f"{name}_samples.jsonl")
    return {name: _summary(name, outcome) for name in outcome["results"]}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """What `run_tasks` wrote for one task."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _check_names(tasks: Sequence[str], known: Sequence[str]) -> None:
    unknown = sorted(set(tasks) - set(known))
    if unknown:
        raise ValueError(
            f"evals.tasks: the harness knows no task {', '.join(unknown)}; tasks that need no "
            f"download: {', '.join(own_tasks())}; for the others see `lm-eval ls tasks`"
        )


def _specification(name: str, questions: Mapping[str, Path], cache: str) -> str | dict[str, Any]:
    """A task's name; for an own task its whole configuration, with the file that it reads."""
    if name not in questions:
        return name
    task = yaml.safe_load((TASKS / f"{name}.yaml").read_text())
    data = {"test": str(questions[name].resolve())}  # relative paths would start from the harness
    return task | {"dataset_kwargs": {"data_files": data, "cache_dir": cache}}


def _summary(name: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """One task's results under names that a metrics store accepts; unfiltered metrics first."""
    metrics: dict[str, float] = {}
    for key, value in outcome["results"][name].items():
        metric, _, rule = key.partition(",")
        if isinstance(value, str) or not rule:
            continue  # the alias, counts, and 'N/A' where no error can be given
        metrics[metric if rule == "none" else f"{metric}/{rule}"] = float(value)
    summary: dict[str, Any] = {
        "num_samples": outcome["n-samples"][name]["effective"],
        "num_fewshot": outcome["n-shot"][name],
        "version": outcome["versions"][name],
        "metrics": metrics,
    }
    metric = headline(metrics)
    named = {"accuracy": metric, "standard_error": f"{metric}_stderr", "accuracy_norm": "acc_norm"}
    return summary | {ours: metrics[theirs] for ours, theirs in named.items() if theirs in metrics}


def headline(metrics: Mapping[str, float]) -> str:
    """The metric that a multiple-choice task is judged by.

    Mutual information (Brown et al. 2020) where the task asks for it: a choice's log-likelihood
    after the context less that without it, so that a choice is not taken for being common.
    """
    return "acc_mutual_info" if "acc_mutual_info" in metrics else "acc"


def _write_samples(samples: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One JSON object a line: the document, the prompt, each choice with its score, the answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            arguments = [list(argument) for argument in sample["arguments"]]
            prompt = arguments[0][0]
            asked = [argument[0] == prompt for argument in arguments]
            line = {
                "document": sample["doc"],
                "prompt": prompt,
                "continuations": [
                    argument[1]
                    for argument, here in zip(arguments, asked, strict=True)
                    if here and len(argument) > 1
                ],
                "scores": list(compress(sample["filtered_resps"], asked)),
                "scores_without_prompt": list(
                    compress(sample["filtered_resps"], map(operator.not_, asked))
                ),
                "target": sample["target"],
                "metrics": {name: sample[name] for name in sample["metrics"]},
            }
            file.write(json.dumps(line, ensure_ascii=False, default=float) + "\n")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars (on standard error) and no log lines below errors from the harness.

    Its warnings are about defaults (generation settings of tasks that generate nothing).
    """
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
