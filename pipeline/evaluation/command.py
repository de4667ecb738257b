"""The verb `eval`, and the eval stage of a run: which checkpoints, in which order, kept how."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from evals.scoring import Scorer
from pipeline.config import Config, ConfigError, IncompleteError, from_dict
from pipeline.data.shards import open_corpus
from pipeline.evaluation import targets
from pipeline.evaluation.measure import RESULTS, Measured, check_tasks, go_offline, measure
from pipeline.evaluation.record import Recorder
from pipeline.evaluation.tables import results_of, score_table
from pipeline.evaluation.workers import RayWorkers
from pipeline.runs import RunFolder, locked, root_folder, write_whole
from pipeline.tracking import TrackingError
from pipeline.train import checkpoint
from pipeline.train.checkpoint import Checkpoint
from pipeline.trained import find_checkpoint

ALL = "all"


def evaluate_run(
    config: Config, run: RunFolder, dataset_path: Path, mlflow_run_id: str | None
) -> dict[str, Any]:
    """Evaluate the checkpoints of a run that `step` names, the newest by default.

    Returns the newest one's results, as `results.json` of the run keeps them under `eval`.
    """
    check_tasks(config.evals)
    go_offline(config.evals)
    results: dict[str, Any] = {}
    for found in _chosen(config, run):
        if config.step == ALL:
            say(f"step {found.step}:")
        results = evaluate_checkpoint(config, run, found, dataset_path, mlflow_run_id)
    return results


def _chosen(config: Config, run: RunFolder) -> list[Checkpoint]:
    if config.step != ALL:
        return [find_checkpoint(config, run)]
    found = [checkpoint.at_step(run.checkpoints, s) for s in checkpoint.steps_in(run.checkpoints)]
    if not found:
        raise ConfigError(f"{run.path} has no checkpoint; train first")
    return found


def evaluate_checkpoint(
    config: Config,
    run: RunFolder,
    found: Checkpoint,
    dataset_path: Path,
    mlflow_run_id: str | None,
) -> dict[str, Any]:
    """Measure one checkpoint, keep the results beside it and send them to MLflow."""
    dataset = open_corpus(config.data, dataset_path)
    measured = targets.of_checkpoint(config, found, dataset)
    folder = run.evals / found.path.name
    make = partial(_scorer_of_checkpoint, config, found, dataset_path)
    with _working(config, measured, make) as ready:
        results = measure(
            ready,
            config.evals,
            folder,
            sequence_length=config.train.sequence_length,
            seed=config.seed,
            progress=say,
        )
    tokens = found.step * config.train.global_batch * config.train.sequence_length
    stamp = {
        "step": found.step,
        "tokens": tokens,
        "suite": config.evals.suite,
        "precision": config.evals.precision,
    }
    results = {**stamp, **results}
    write_whole(folder / RESULTS, json.dumps(results, indent=2) + "\n")
    if mlflow_run_id and not config.tracking.offline:
        with _kept_on_disk():
            recorder = Recorder(config, root_folder(config), mlflow_run_id)
            recorder.record(results, folder, (run.id, found.path))
    return results


def evaluate_folder(config: Config, folder: Path) -> dict[str, Any]:
    """Measure a Hugging Face folder, or a checkpoint without its run, for the same table."""
    check_tasks(config.evals)
    go_offline(config.evals)
    alone = (folder / checkpoint.STATE).is_file()
    if alone:
        config = targets.standalone_config(folder, config)
        prepared = targets.prepared_folder(config.data, root_folder(config))
        dataset = open_corpus(config.data, prepared) if prepared.is_dir() else None
        measured = targets.of_checkpoint(config, _at(folder), dataset)
        make = partial(_scorer_of_checkpoint, config, _at(folder), prepared)
    else:
        measured = targets.of_folder(config, folder)
        make = partial(_scorer_of_folder, config, folder)
    label = f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    place = root_folder(config) / "evals" / label
    with _working(config, measured, make) as ready:
        results = measure(
            ready,
            config.evals,
            place,
            sequence_length=config.train.sequence_length,
            seed=config.seed,
            progress=say,
        )
    stamp = {"name": folder.name, "folder": str(folder), "suite": config.evals.suite}
    results = {**stamp, "precision": config.evals.precision if alone else "as stored", **results}
    write_whole(place / RESULTS, json.dumps(results, indent=2) + "\n")
    if not config.tracking.offline:
        with _kept_on_disk():
            recorder = Recorder.of_folder(config, root_folder(config), label, str(folder))
            recorder.record(results, place, None)
    print("\n".join(["", *score_table({folder.name: results})]))
    print(f"\nresults {place / RESULTS}")
    return results


def follow(config: Config, run: RunFolder, dataset_path: Path) -> None:
    """Evaluate each new checkpoint of a run that is training, until it has ended.

    Nothing of the run is locked or written but its folder `evals`.
    """
    check_tasks(config.evals)
    go_offline(config.evals)
    run.evals.mkdir(parents=True, exist_ok=True)
    done: set[int] = set()
    with locked(RunFolder(run.evals)):
        while True:
            ended = not is_training(run)  # before the look: what appears after it is seen next time
            new = [s for s in checkpoint.steps_in(run.checkpoints) if s not in done]
            for step in new:
                done.add(step)
                try:
                    found = checkpoint.at_step(run.checkpoints, step)
                    print(f"\n[eval] step {step}", flush=True)
                    evaluate_checkpoint(config, run, found, dataset_path, mlflow_id(run))
                except checkpoint.CheckpointError as error:
                    say(f"step {step}: {error}")
                except OSError as error:
                    if step in checkpoint.steps_in(run.checkpoints):
                        raise
                    say(f"step {step}: the run has removed it: {error}")
            if ended and not new:
                return
            if not new:
                time.sleep(config.evals.watch_seconds)


def is_training(run: RunFolder) -> bool:
    """Whether a process works on the run."""
    from pipeline.runs import is_locked

    return is_locked(run)


def mlflow_id(run: RunFolder) -> str | None:
    """The run's id in MLflow; None where it has none."""
    state = run.path / "tracking.json"
    return json.loads(state.read_text())["run_id"] if state.is_file() else None


def refuse_incomplete(results: dict[str, Any]) -> None:
    """Raise `IncompleteError` that names the tasks whose data could not be had."""
    skipped = {
        name: why
        for name, why in results.get("skipped", {}).items()
        if "evals.allow_code" not in why
    }
    if skipped:
        raise IncompleteError(
            "left out: " + "; ".join(f"{name} ({why})" for name, why in skipped.items())
        )


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def named(raw: dict[str, Any]) -> tuple[Config, targets.Named]:
    """The composed configuration, and what its `run` names."""
    config = from_dict(raw)
    if config.run is None:
        raise ConfigError(
            "run: name the run, run=<id> or run=latest, or its MLflow id; or a checkpoint's or a "
            "Hugging Face folder"
        )
    return config, targets.find(config)


def _at(folder: Path) -> Checkpoint:
    problems = checkpoint.problems(folder)
    if problems:
        raise ConfigError("; ".join(problems))
    return Checkpoint(folder, json.loads((folder / checkpoint.STATE).read_text()))


@contextlib.contextmanager
def _working(config: Config, measured: Measured, make: Any) -> Iterator[Measured]:
    """The model with Ray's workers where the configuration asks for some."""
    if not config.evals.workers:
        yield measured
        return
    from pipeline.ray_session import ray_session

    count, gpus = config.evals.workers, config.cluster.gpus_per_worker
    with ray_session(config.cluster.address):
        _require_room(count, gpus)
        with RayWorkers(make, count, gpus) as workers:
            subject = dataclasses.replace(measured.subject, workers=workers)
            yield dataclasses.replace(measured, subject=subject)


def _require_room(count: int, gpus: int) -> None:
    """Workers that a cluster cannot hold would be waited for without end. Raises `ConfigError`."""
    import ray

    available = ray.cluster_resources()
    for kind, need in (("CPU", count), ("GPU", count * gpus)):
        if need > available.get(kind, 0):
            raise ConfigError(
                f"evals.workers={count}: they need {need} {kind}, and Ray has "
                f"{available.get(kind, 0):g}; take fewer"
            )


def _scorer_of_checkpoint(config: Config, found: Checkpoint, dataset_path: Path) -> Scorer:
    return _scorer(targets.of_checkpoint(config, found, open_corpus(config.data, dataset_path)))


def _scorer_of_folder(config: Config, folder: Path) -> Scorer:
    return _scorer(targets.of_folder(config, folder))


def _scorer(measured: Measured) -> Scorer:
    subject = measured.subject
    return Scorer(subject.lm, subject.tokenizer, subject.eos_id)


def send_all(config: Config, run: RunFolder, mlflow_run_id: str) -> None:
    """Send every evaluation of a run. Raises `TrackingError`."""
    recorder = Recorder(config, root_folder(config), mlflow_run_id)
    for results in results_of(run):
        folder = run.evals / f"step-{results['step']:08d}"
        recorder.record(results, folder, (run.id, run.checkpoints / folder.name))


@contextlib.contextmanager
def _kept_on_disk() -> Iterator[None]:
    """A store that went away never stops an evaluation."""
    try:
        yield
    except TrackingError as error:
        say(f"tracking store unreachable, results are kept on disk: {error}")
