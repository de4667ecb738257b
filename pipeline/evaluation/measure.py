"""Held-out loss by domain, its baselines, and tasks, of one model; finished results are kept.

A task's result is kept in `<folder>/<task>.json` with the key of all that it depends on: weights,
precision, task, shots, files. The same question again is answered from there. The baselines are
counted anew each time (a second for five million tokens), so that they belong to the same tokens as
the model's loss beyond doubt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evals.baselines import Bigram, baseline_loss
from evals.continuation import make_questions, write_questions
from evals.domains import DomainLoss, document_loss, domain_loss
from evals.harness import Subject, clustered_error, read_samples, run_task
from evals.registry import (
    TASKS,
    Files,
    Registry,
    TaskSettings,
    TaskUnavailableError,
    check_names,
    hub_answers,
    local_file,
    own_tasks,
)
from model import HybridModel
from pipeline.config import ConfigError, EvalsConfig, digest
from pipeline.data.shards import Dataset
from pipeline.data.stream import validation_rows
from pipeline.runs import write_whole

RESULTS = "results.json"
CONTINUATION = "continuation"
CODE_TASKS = ("humaneval_plus", "local_mbpp", "mbpp_plus")
BASELINE_TOKENS = 50_000_000  # of a domain's training stream, for the baselines' counts
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """A model to measure.

    identity: hash of the weights and of the precision they are used in.
    model, untrained: for the loss on packed rows, and as the first baseline; None for a model of
        another tokenizer, which reads the held-out documents as text.
    dataset: the prepared corpus; None: no loss by domain.
    skip_damaged: whether the baselines may go without a shard that is damaged.
    """

    subject: Subject
    identity: str
    dataset: Dataset | None
    model: HybridModel | None = None
    untrained: HybridModel | None = None
    skip_damaged: bool = False


def check_tasks(config: EvalsConfig) -> None:
    """Refuse names and files that do not exist, before any work. Raises `ConfigError`."""
    try:
        names = [m for name in config.tasks for m in _settings(config, name).members or (name,)]
        check_names(names)
        for name in names:
            local_file(name, _own_file(name), _files(config))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def measure(
    measured: Measured,
    config: EvalsConfig,
    folder: Path,
    sequence_length: int,
    seed: int,
    *,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Measure a model in the precision that it stands in; write and return the results.

    Args:
        folder: takes `results.json`, the questions and every sample of the tasks.
        sequence_length: tokens of a row of held-out text.
        progress: called with a line for each step.

    Returns:
        {"identity": of the weights and their precision,
         "domains": {name: {"loss", "bits_per_byte", "tokens", "bytes",
                            "untrained_bits_per_byte", "unigram_bits_per_byte",
                            "bigram_bits_per_byte"}},
         "tasks": {name: what `evals.harness.run_task` says, for `continuation` also "per_domain"
                   (accuracy, standard error, number), "too_short" (documents left out)}, also
                   those of earlier measurements of the same model under the same limits,
         "skipped": {name: why the task could not be run}}

    Raises:
        ConfigError: for a task that does not exist; with `on_missing=fail` where one cannot be run.
    """
    check_tasks(config)
    folder.mkdir(parents=True, exist_ok=True)
    domains = _domains(measured, config, sequence_length, progress)
    tasks, skipped = _tasks(measured, config, folder, seed, progress)
    of = {"limit": config.limit, "max_length": measured.subject.max_length}
    tasks = {name: {**result, **of} for name, result in tasks.items()}
    tasks = _measured_before(folder / RESULTS, measured.identity, of) | tasks
    results = {
        "identity": measured.identity, "domains": domains, "tasks": tasks, "skipped": skipped,
    }  # fmt: skip
    write_whole(folder / RESULTS, json.dumps(results, indent=2) + "\n")
    return results


def _measured_before(path: Path, identity: str, of: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What other suites found of the same weights, in the same precision, under the same limits."""
    try:
        earlier = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if earlier.get("identity") != identity:
        return {}
    return {
        name: result
        for name, result in earlier["tasks"].items()
        if all(key in result and result[key] == value for key, value in of.items())
    }


def _domains(
    measured: Measured, config: EvalsConfig, sequence_length: int, progress: Progress
) -> dict[str, dict[str, float]]:
    dataset = measured.dataset
    if dataset is None:
        progress("no prepared corpus here: no loss by domain")
        return {}
    token_bytes = dataset.token_bytes()
    domains = {}
    for name in dataset.sources:
        held_out = len(dataset.holdout(name))
        rows = validation_rows(dataset, name, sequence_length, held_out + sequence_length)
        if not len(rows.tokens_BT):
            progress(f"{name}: nothing is held out, so nothing is measured")
            continue
        bigram = _fit_bigram(dataset, name, measured.skip_damaged, progress)
        others = {
            "unigram": baseline_loss(bigram.unigram, rows, token_bytes),
            "bigram": baseline_loss(bigram, rows, token_bytes),
        }
        if measured.untrained is not None:
            others["untrained"] = domain_loss(
                measured.untrained, rows, token_bytes, config.batch_size
            )
        if measured.model is not None:
            ours = domain_loss(measured.model, rows, token_bytes, config.batch_size)
        else:
            ours = _loss_of_text(measured.subject, dataset, name)
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


def _loss_of_text(subject: Subject, dataset: Dataset, source: str) -> DomainLoss:
    documents = dataset.holdout_documents(source)
    texts = [document["text"] for document in documents if not document["reserved"]]
    return document_loss(
        subject.lm,
        [[*subject.tokenizer.encode(text, False), subject.eos_id] for text in texts],
        [len(text.encode()) for text in texts],
        lambda token: len(subject.tokenizer.decode([token]).encode()),
        subject.max_length,
        subject.batch_size,
    )


def _fit_bigram(dataset: Dataset, source: str, skip_damaged: bool, progress: Progress) -> Bigram:
    """Counts of the domain's training stream, which is what the model saw of the domain.

    Raises `DamagedShardError`, with `skip_damaged` only where nothing is left.
    """
    tokens, damaged = dataset.read_intact(source, BASELINE_TOKENS)
    for error in damaged:
        if not skip_damaged or not len(tokens):
            raise error
        progress(f"{source}: the baselines go without {error.file}, which is damaged")
    return Bigram.fit(tokens, dataset.vocab_size, dataset.eos_id)


def _tasks(
    measured: Measured, config: EvalsConfig, folder: Path, seed: int, progress: Progress
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Results by task, and why the others have none."""
    results: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    registry: Registry | None = None
    for name in config.tasks:
        files = _files(config)
        too_short: dict[str, int] = {}
        try:
            if name == CONTINUATION:
                path, too_short = _questions(measured.dataset, config, folder, seed)
                files = dataclasses.replace(files, of_task={name: path})
            if name in CODE_TASKS and not config.allow_code:
                raise TaskUnavailableError("runs code that the model wrote: evals.allow_code=true")
            key = _key(measured, config, name, files)
            kept = folder / f"{name}.json"
            result = None if config.again else _kept_result(kept, key)
            note = " (kept)" if result else ""
            if result is None:
                if registry is None:
                    settings = {each: _settings(config, each) for each in config.tasks}
                    registry = Registry(config.tasks, settings)
                result = run_task(
                    measured.subject,
                    name,
                    registry,
                    folder,
                    files,
                    limit=config.limit,
                    allow_code=config.allow_code,
                    responses=folder / f".{name}-{key[:16]}.db",
                )
                if name == CONTINUATION:
                    samples = folder / f"{name}_samples.jsonl"
                    result |= {"per_domain": _by_domain(samples), "too_short": too_short}
                write_whole(kept, json.dumps({"key": key, "result": result}, indent=1) + "\n")
        except TaskUnavailableError as error:
            if config.on_missing == "fail" and name not in CODE_TASKS:
                raise ConfigError(f"evals.tasks: {name}: {error}") from error
            skipped[name] = str(error)
            progress(f"{name}: left out: {error}")
            continue
        results[name] = result
        progress(f"{name}: {describe_score(result)} of {result['num_samples']} questions{note}")
    return results, skipped


def describe_score(result: dict[str, Any]) -> str:
    """`43.1%`, or a perplexity as it is."""
    score = result["score"]
    return f"{result['metric']} {score:.2f}" if "perplex" in result["metric"] else f"{score:.1%}"


def _questions(
    dataset: Dataset | None, config: EvalsConfig, folder: Path, seed: int
) -> tuple[Path, dict[str, int]]:
    """The file of the continuation task, and by domain how many documents were too short."""
    if dataset is None:
        raise TaskUnavailableError("asks about the held-out text of a corpus, and none is prepared")
    documents = {name: dataset.holdout_documents(name) for name in dataset.sources}
    made, too_short = make_questions(documents, config.num_questions, seed)
    if not made:
        raise TaskUnavailableError("the held-out documents are too short for it")
    path = folder / f"{CONTINUATION}.jsonl"
    write_questions(made, path)
    return path, too_short


def _kept_result(path: Path, key: str) -> dict[str, Any] | None:
    """The finished result of this very question; None where there is none."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return kept["result"] if kept.get("key") == key else None


def _key(measured: Measured, config: EvalsConfig, name: str, files: Files) -> str:
    """Hash of all that a task's result depends on."""
    settings = _settings(config, name)
    members = settings.members or (name,)
    read = [local_file(member, _own_file(member), files) for member in members]
    own = [TASKS / f"{member}.yaml" for member in members if member in own_tasks()]
    return digest(
        {
            "weights": measured.identity,
            "task": name,
            "settings": dataclasses.asdict(settings),
            "limit": config.limit,
            "max_length": measured.subject.max_length,
            "files": [_hash(path) for path in [*own, *read] if path is not None],
            "harness": importlib.metadata.version("lm-eval"),
        }
    )


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _settings(config: EvalsConfig, name: str) -> TaskSettings:
    return config.details.get(name, TaskSettings())


def _files(config: EvalsConfig) -> Files:
    return Files(Path(config.files).expanduser() if config.files else None)


def _own_file(name: str) -> str | None:
    """The file that an own task names in its metadata; continuation's is made."""
    import yaml

    path = TASKS / f"{name}.yaml"
    if not path.is_file():
        return None
    lines = [line for line in path.read_text().splitlines() if line.startswith("  file:")]
    return yaml.safe_load(lines[0])["file"] if lines else None


def go_offline(config: EvalsConfig) -> None:
    """Where no task needs the hub, or it does not answer, nobody waits for it.

    What was downloaded before is still found. To be called before transformers or the harness are
    imported: they look once.
    """
    needs_hub = any(
        _own_file(member) is None and member != CONTINUATION
        for name in config.tasks
        for member in _settings(config, name).members or (name,)
    )
    if not needs_hub or not hub_answers():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


def _by_domain(samples: Path) -> dict[str, dict[str, float]]:
    """Accuracy, its standard error (by document) and the number of questions of each domain."""
    correct = defaultdict(list)
    for sample in read_samples(samples):
        document = sample["document"]
        right = sample["metrics"]["acc_mutual_info"]
        correct[document["domain"]].append((right, document["document"]))
    return {
        domain: {
            "accuracy": float(np.mean([right for right, _ in each])),
            "standard_error": clustered_error(*map(list, zip(*each, strict=True))),
            "num_samples": len(each),
        }
        for domain, each in correct.items()
    }


__all__ = ["Measured", "check_tasks", "describe_score", "go_offline", "measure"]
