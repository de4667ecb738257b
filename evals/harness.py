"""Run lm-evaluation-harness tasks on a model: ours, from local files, or the harness's own.

The harness is imported only here, when a task runs (it takes 2 s).
"""

from __future__ import annotations

import json
import operator
import os
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from evals.lm import LanguageModel
from evals.registry import Files, Registry, TaskSettings, TaskUnavailableError, quiet
from evals.scoring import Scorer
from evals.tokenizers import TextTokenizer

HEADLINES = ("acc_mutual_info", "acc", "exact_match", "pass_at_1", "word_perplexity", "perplexity")
FEWSHOT_SEED = 1234
NO_FILES = Files()


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and how.

    eos_id, prefix_id: the end-of-text token, and the one before a text without context (None: the
        same).
    max_length: positions that the model sees at most; longer contexts lose their beginning.
    workers: who computes; None: this process. See `evals.adapter.Workers`.
    """

    lm: LanguageModel
    tokenizer: TextTokenizer
    eos_id: int
    max_length: int
    batch_size: int = 32
    prefix_id: int | None = None
    workers: Any = None


def run_task(
    subject: Subject,
    name: str,
    registry: Registry,
    folder: Path,
    files: Files = NO_FILES,
    *,
    limit: int | None = None,
    allow_code: bool = False,
    responses: Path | None = None,
) -> dict[str, Any]:
    """Evaluate one task or group; write every sample to `<folder>/<task>_samples.jsonl`.

    Args:
        limit: questions of each task, its first ones; None: all.
        allow_code: whether a task may run code that the model wrote; see `evals.sandbox`.
        responses: a file that keeps the model's responses until the task is done, so that one that
            was interrupted goes on; it belongs to this model and these settings alone.

    Returns:
        `label`, `metric` (which one the task is judged by), `score`, `standard_error`, `chance`,
        `num_samples`, `num_fewshot`, `version`, `truncated` (requests that lost their beginning),
        `metrics`: every metric of the harness by its own name, `_stderr` and filters included;
        `subtasks` of a group: score, standard error and number of each; for tasks judged by an
        accuracy `accuracy`, and `accuracy_norm` (per byte) where the task has it.

    Raises:
        TaskUnavailableError: where the task's data or packages cannot be had, or it does not suit
            the model.
        ValueError: for a local file that is not there.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = registry.settings.get(name, TaskSettings())
    with quiet(), tempfile.TemporaryDirectory() as cache:
        from lm_eval import evaluator
        from lm_eval.api.model import CachingLM

        from evals.adapter import HarnessModel, Local

        loaded = registry.build(name, files, cache)
        for task in loaded["tasks"].values():
            if settings.shots is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=settings.shots or 0)
            task.set_fewshot_seed(FEWSHOT_SEED)
        lm = HarnessModel(
            subject.workers or Local(Scorer(subject.lm, subject.tokenizer, subject.eos_id)),
            subject.tokenizer,
            subject.eos_id,
            subject.max_length,
            subject.batch_size,
            prefix_id=subject.prefix_id,
            shares_prefixes=subject.lm.shares_prefixes,
        )
        folder.mkdir(parents=True, exist_ok=True)
        caching = CachingLM(lm, str(responses or Path(cache, "responses.db")))
        try:
            outcome: Mapping[str, Any] = evaluator.evaluate(
                caching,
                loaded,
                limit=limit,
                bootstrap_iters=100,
                confirm_run_unsafe_code=allow_code,
            )
        except ValueError as error:
            raise TaskUnavailableError(str(error)) from error
        finally:
            caching.dbdict.close()
        samples = [each for part in outcome["samples"].values() for each in part]
        _write_samples(samples, folder / f"{name}_samples.jsonl")
        requests = [each for task in loaded["tasks"].values() for each in task.instances]
        truncated = sum(map(lm.truncates, requests))
        summary = _summary(name, settings, outcome, loaded) | {"truncated": truncated}
        if responses is not None:
            responses.unlink()
    return summary


def read_samples(path: Path) -> list[dict[str, Any]]:
    """What `run_task` wrote for one task."""
    with path.open(encoding="utf-8", newline="\n") as file:  # text may hold other line ends
        return [json.loads(line) for line in file]


def clustered_error(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """The standard error of the mean of values that are independent between clusters only.

    Questions that are asked of one document share its text, so that they are answered rightly or
    wrongly together (arXiv 2411.00640, section 2.2). With every value a cluster of its own this is
    the usual standard error, sd / sqrt(n), with n - 1 in the variance.
    """
    residuals = np.asarray(values, float) - np.mean(values)
    sums: dict[Hashable, float] = defaultdict(float)
    for residual, cluster in zip(residuals, clusters, strict=True):
        sums[cluster] += residual
    if len(sums) < 2:
        return 0.0
    spread = sum(value**2 for value in sums.values()) * len(sums) / (len(sums) - 1)
    return float(np.sqrt(spread) / len(residuals))


def _summary(
    name: str, settings: TaskSettings, outcome: Mapping[str, Any], loaded: Mapping[str, Any]
) -> dict[str, Any]:
    """One task's or group's results under names that a metrics store accepts."""
    tasks = loaded["tasks"]
    parts = {task: _part(task, settings, outcome, tasks[task]) for task in tasks}
    if list(parts) == [name]:
        return parts[name]
    numbers = [part["num_samples"] for part in parts.values()]
    weights = np.array(numbers) / sum(numbers)

    def mean(key: str) -> float:
        return float(np.dot(weights, [part[key] for part in parts.values()]))

    first = next(iter(parts.values()))
    errors = np.array([part["standard_error"] or 0.0 for part in parts.values()])
    return {
        "label": settings.label or name,
        "metric": first["metric"],
        "score": mean("score"),
        "standard_error": float(np.sqrt(((weights * errors) ** 2).sum())),
        "chance": mean("chance"),
        "num_samples": sum(numbers),
        "num_fewshot": first["num_fewshot"],
        "version": first["version"],
        "metrics": {},
        "subtasks": {
            task: {key: part[key] for key in ("score", "standard_error", "num_samples")}
            for task, part in parts.items()
        },
    }


def _part(
    name: str, settings: TaskSettings, outcome: Mapping[str, Any], task: Any
) -> dict[str, Any]:
    metrics: dict[str, float] = {}
    for key, value in outcome["results"][name].items():
        metric, _, rule = key.partition(",")
        if isinstance(value, str) or not rule:
            continue  # the alias, counts, and 'N/A' where no error can be given
        metrics[metric if rule == "none" else f"{metric}/{rule}"] = float(value)
    metadata = task.config.metadata or {}
    metric = _headline(metrics, settings.metric or metadata.get("metric"))
    base, _, rule = metric.partition("/")
    error = metrics.get(f"{base}_stderr" + (f"/{rule}" if rule else ""))
    samples = outcome["samples"][name]
    if cluster := metadata.get("cluster"):
        values = [sample[metric] for sample in samples]
        clusters = [tuple(sample["doc"][key] for key in cluster) for sample in samples]
        error = metrics[f"{metric}_stderr"] = clustered_error(values, clusters)
    summary = {
        "label": settings.label or metadata.get("label", name),
        "metric": metric,
        "score": metrics[metric],
        "standard_error": error,
        "chance": _chance(task, samples),
        "num_samples": outcome["n-samples"][name]["effective"],
        "num_fewshot": outcome["n-shot"][name],
        "version": outcome["versions"][name],
        "metrics": metrics,
    }
    if base.startswith("acc"):
        summary["accuracy"] = metrics[metric]
    if "acc_norm" in metrics:
        summary["accuracy_norm"] = metrics["acc_norm"]
    return summary


def _headline(metrics: Mapping[str, float], wanted: str | None) -> str:
    """The metric that a task is judged by. Raises `TaskUnavailableError` where that is missing."""
    own = [name for name in metrics if "_stderr" not in name]
    if wanted is not None:
        if wanted not in metrics:
            raise TaskUnavailableError(f"no metric {wanted!r}; the task gives {', '.join(own)}")
        return wanted
    for name in HEADLINES:
        for candidate in own:
            if candidate.partition("/")[0] == name:
                return candidate
    return own[0]


def _chance(task: Any, samples: Sequence[Mapping[str, Any]]) -> float:
    """What guessing gets: of a multiple-choice task one over the number of choices, else 0."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    doubled = 2 if "acc_mutual_info" in samples[0] else 1
    return float(np.mean([doubled / len(sample["arguments"]) for sample in samples]))


def _write_samples(samples: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One JSON object a line: the document, the prompt, each choice with its score, the answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            arguments = [list(argument) for argument in sample["arguments"]]
            prompt = arguments[0][0]
            asked = [argument[0] == prompt for argument in arguments]
            if "acc_mutual_info" not in sample["metrics"]:
                asked = [True] * len(arguments)  # choices of beginnings: each is its own prompt
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
            if len({argument[0] for argument in compress(arguments, asked)}) > 1:
                line["prompts"] = [argument[0] for argument in arguments]
            file.write(json.dumps(line, ensure_ascii=False, default=float) + "\n")
