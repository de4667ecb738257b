"""The eval stage: held-out loss by domain, its baselines, and harness tasks, on one model.

The baselines are counted anew each time (a second for five million tokens), so that they belong to
the same tokens as the model's loss beyond doubt.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evals.baselines import Bigram, baseline_loss
from evals.continuation import CHANCE, make_questions, write_questions
from evals.domains import domain_loss
from evals.harness import headline, read_samples, run_tasks
from model import HybridModel
from pipeline.config import EvalsConfig
from pipeline.data.shards import Dataset
from pipeline.data.stream import validation_rows
from pipeline.data.tokenizer import load_tokenizer
from pipeline.runs import write_whole

RESULTS = "results.json"
CONTINUATION = "continuation"
BASELINE_TOKENS = 50_000_000  # of a domain's training stream, for the baselines' counts


def evaluate(
    model: HybridModel,
    untrained: HybridModel,
    dataset: Dataset,
    config: EvalsConfig,
    folder: Path,
    sequence_length: int,
    seed: int,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Evaluate a model in the precision that it stands in; write and return the results.

    Args:
        model: the trained model.
        untrained: the same model freshly initialized, the first of the baselines.
        dataset: the prepared corpus whose held-out documents are used, all of them.
        folder: takes `results.json`, the questions and every sample of the tasks.
        sequence_length: tokens of a row, and the longest context of a task.
        progress: called with a line for each step.

    Returns:
        {"domains": {name: {"loss", "bits_per_byte", "tokens", "bytes",
                            "untrained_bits_per_byte", "unigram_bits_per_byte",
                            "bigram_bits_per_byte"}},
         "tasks": {name: what `evals.harness.run_tasks` says, for `continuation` also "chance",
                   "per_domain" (accuracy, standard error, number), "too_short" (documents left
                   out)}}

    Raises:
        ValueError: for a domain without held-out text, or a task that does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {
        "domains": _domains(model, untrained, dataset, config, sequence_length, progress),
        "tasks": _tasks(model, dataset, config, folder, sequence_length, seed, progress),
    }
    write_whole(folder / RESULTS, json.dumps(results, indent=2) + "\n")
    return results


def _domains(
    model: HybridModel,
    untrained: HybridModel,
    dataset: Dataset,
    config: EvalsConfig,
    sequence_length: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    token_bytes = dataset.token_bytes()
    domains = {}
    for name in dataset.sources:
        held_out = len(dataset.holdout(name))
        rows = validation_rows(dataset, name, sequence_length, held_out + sequence_length)
        if not len(rows.tokens_BT):
            progress(f"{name}: nothing is held out, so nothing is measured")
            continue
        bigram = _fit_bigram(dataset, name)
        ours = domain_loss(model, rows, token_bytes, config.batch_size)
        others = {
            "untrained": domain_loss(untrained, rows, token_bytes, config.batch_size),
            "unigram": baseline_loss(bigram.unigram, rows, token_bytes),
            "bigram": baseline_loss(bigram, rows, token_bytes),
        }
        domains[name] = {
            "loss": ours.loss,
            "bits_per_byte": ours.bits_per_byte,
            "tokens": ours.tokens,
            "bytes": ours.bytes,
        } | {f"{label}_bits_per_byte": other.bits_per_byte for label, other in others.items()}
        progress(
            f"{name}: {ours.bits_per_byte:.3f} bits per byte "
            f"(bigram {others['bigram'].bits_per_byte:.3f}, {ours.bytes:,} bytes held out)"
        )
    return domains


def _fit_bigram(dataset: Dataset, source: str) -> Bigram:
    """Counts of the domain's training stream, which is what the model saw of the domain."""
    tokens = dataset.read(source, 0, min(dataset.num_tokens(source), BASELINE_TOKENS))
    return Bigram.fit(np.asarray(tokens), dataset.vocab_size, dataset.eos_id)


def _tasks(
    model: HybridModel,
    dataset: Dataset,
    config: EvalsConfig,
    folder: Path,
    sequence_length: int,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    if not config.tasks:
        return {}
    questions: dict[str, Path] = {}
    too_short: dict[str, int] = {}
    if CONTINUATION in config.tasks:
        documents = {name: dataset.holdout_documents(name) for name in dataset.sources}
        made, too_short = make_questions(documents, config.num_questions, seed)
        if not made:
            progress("continuation: the held-out documents are too short for it; left out")
            config = dataclasses.replace(
                config, tasks=tuple(name for name in config.tasks if name != CONTINUATION)
            )
            return _tasks(model, dataset, config, folder, sequence_length, seed, progress)
        questions[CONTINUATION] = folder / f"{CONTINUATION}.jsonl"
        write_questions(made, questions[CONTINUATION])
    tasks = run_tasks(
        model,
        load_tokenizer(dataset.tokenizer_path),
        dataset.eos_id,
        config.tasks,
        folder,
        questions=questions,
        max_length=sequence_length,
        batch_size=config.batch_size,
    )
    if CONTINUATION in tasks:
        samples = folder / f"{CONTINUATION}_samples.jsonl"
        tasks[CONTINUATION] |= {
            "chance": CHANCE,
            "per_domain": _by_domain(samples),
            "too_short": too_short,
        }
    for name, task in tasks.items():
        if "accuracy" in task:
            progress(f"{name}: {task['accuracy']:.1%} of {task['num_samples']} questions")
    return tasks


def _by_domain(samples: Path) -> dict[str, dict[str, float]]:
    """Accuracy, its standard error and the number of questions of each domain."""
    correct = defaultdict(list)
    for sample in read_samples(samples):
        metrics = sample["metrics"]
        correct[sample["document"]["domain"]].append(metrics[headline(metrics)])
    return {
        domain: {
            "accuracy": float(np.mean(each)),
            "standard_error": float(np.std(each) / np.sqrt(max(len(each) - 1, 1))),
            "num_samples": len(each),
        }
        for domain, each in correct.items()
    }
