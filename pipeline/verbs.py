"""What each verb of the command line does, given the composed configuration.

`run`, `prepare` and `train` start a run (or resume one); `eval`, `report`, `compare fidelity`,
`export`, `generate`, `status`, `data at` and `track` work on a run that exists, with its own
configuration: only `OVERRIDABLE` sections and keys may be given there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeline.config import Config, ConfigError, UnreachableError, from_dict
from pipeline.lifecycle import mlflow_status, start, work
from pipeline.runs import RunFolder, find_run, load_config, locked, root_folder

OVERRIDABLE = (
    "evals",
    "export",
    "fidelity",
    "generate",
    "tracking",
    "root",
    "row",
    "run",
    "source",
    "step",
)


def run(raw: dict[str, Any], overrides: list[str]) -> None:
    """All configured stages."""
    config = from_dict(raw)
    found = start(config, config.stages)
    if "eval" in config.stages:
        from pipeline.evaluation.command import refuse_incomplete

        refuse_incomplete(json.loads(found.results.read_text())["eval"])


def train(raw: dict[str, Any], overrides: list[str]) -> None:
    """The prepare and train stages."""
    start(from_dict(raw), ("prepare", "train"))


def prepare(raw: dict[str, Any], overrides: list[str]) -> None:
    """The prepare stage alone; no run is made."""
    from pipeline.data.prepare import prepare as prepare_corpus

    config = from_dict(raw)
    folder = prepare_corpus(config.data, root_folder(config), address=config.cluster.address)
    print(f"prepared corpus: {folder}")


def eval(raw: dict[str, Any], overrides: list[str]) -> None:
    """The eval stage on an existing run, and its report anew; or on a model that no run made."""
    from pipeline.evaluation import command
    from pipeline.evaluation.targets import names_folder
    from pipeline.stages import dataset_folder

    if not names_folder(str(raw["run"])):
        _check_overrides(overrides)
    composed, named = command.named(raw)
    if named.run is None:
        assert named.folder is not None
        command.refuse_incomplete(command.evaluate_folder(composed, named.folder))
        return
    raw["run"], raw["root"] = named.run.id, str(named.run.path.parent)
    if named.step is not None:
        raw["step"] = named.step
    config, found = _existing(raw, overrides, named.run)
    if config.evals.watch:
        command.follow(config, found, dataset_folder(config, found))
    work(config, found, ("eval", "report"), again=True)
    command.refuse_incomplete(json.loads(found.results.read_text())["eval"])


def report(raw: dict[str, Any], overrides: list[str]) -> None:
    """The report of an existing run."""
    config, found = _existing(raw, overrides)
    work(config, found, ("report",), again=True)


def compare_fidelity(raw: dict[str, Any], overrides: list[str]) -> None:
    """How far each recipe is from BF16, on checkpoints of an existing run."""
    from pipeline.compare import fidelity
    from pipeline.stages import tracker_safely
    from pipeline.tracking import Tracker

    config, found = _existing(raw, overrides)
    tracker = Tracker(config, root_folder(config), found)
    with locked(found):
        tracker.start()
        try:
            fidelity(config, found)
            tracker_safely(lambda: tracker.log_files(found.fidelity))
        finally:
            tracker_safely(lambda: tracker.finish(mlflow_status(found)))


def compare_study(raw: dict[str, Any], overrides: list[str]) -> None:
    """Runs that differ in one thing, and how they differ."""
    from pipeline.compose import compose
    from pipeline.study.stage import run_study

    of_runs = [item for item in overrides if not item.lstrip("+~").startswith("study")]
    run_study(from_dict(raw), compose, of_runs)


def export(raw: dict[str, Any], overrides: list[str]) -> None:
    """A checkpoint of an existing run as a Hugging Face folder."""
    from pipeline.export.stage import export as export_checkpoint
    from pipeline.stages import tracker_safely
    from pipeline.tracking import Tracker

    config, found = _existing(raw, overrides)
    tracker = Tracker(config, root_folder(config), found)
    with locked(found):
        tracker.start()
        try:
            folder, record = export_checkpoint(config, found)
            tracker_safely(lambda: tracker.log_export(folder, record))
        finally:
            tracker_safely(lambda: tracker.finish(mlflow_status(found)))


def generate(raw: dict[str, Any], overrides: list[str]) -> None:
    """Continue texts with an existing run's model, streamed to the terminal."""
    from pipeline.generate import generate as generate_texts

    generate_texts(*_existing(raw, overrides))


def track(raw: dict[str, Any], overrides: list[str]) -> None:
    """Send to the tracking store what a run could not send."""
    from pipeline.evaluation.command import send_all
    from pipeline.tracking import Tracker, TrackingError

    config, found = _existing(raw, overrides)
    tracker = Tracker(config, root_folder(config), found)
    if tracker.offline:
        raise ConfigError("tracking.offline=true: nothing to send; add tracking.offline=false")
    with locked(found):
        tracker.start()
        results = (found.results, found.report, found.figures, found.fidelity)
        try:
            tracker.log_files(*(path for path in results if path.exists()))
            send_all(config, found, str(tracker.mlflow_run_id))
            tracker.finish(mlflow_status(found))
        except TrackingError as error:
            raise UnreachableError(f"{error}; the same command goes on") from error
    print(f"sent to {tracker.uri}, run {tracker.mlflow_run_id}")


def status(raw: dict[str, Any], overrides: list[str]) -> None:
    """A run at a glance; without `run=`, a submitted job."""
    from pipeline.status import describe

    if raw["run"] is None and (raw["cluster"]["address"] or raw["cluster"]["kubernetes"]):
        from pipeline.kubernetes.jobs import jobs_of

        print("\n".join(jobs_of(from_dict(raw)).status()))
        return
    config, found = _existing(raw, overrides)
    print("\n".join(describe(config, found)))


def plan(raw: dict[str, Any], overrides: list[str]) -> None:
    """What a run would take; nothing is started, looked for or written."""
    from pipeline.plan.estimate import smallest
    from pipeline.plan.text import describe

    automatic = raw["cluster"]["nodes"] == "auto"
    print("\n".join(describe(smallest(raw) if automatic else from_dict(raw))))


def manifest(raw: dict[str, Any], overrides: list[str]) -> None:
    """The Kubernetes objects of a job, as YAML."""
    from pipeline.kubernetes.manifest import as_yaml
    from pipeline.kubernetes.manifest import manifest as objects_of

    config = from_dict(raw)
    _refuse_impossible(config)
    print(as_yaml(objects_of(config)), end="")


def submit(raw: dict[str, Any], overrides: list[str]) -> None:
    """Hand the job over to Kubernetes, or to a Ray cluster that is there."""
    from pipeline.kubernetes.jobs import jobs_of

    config = from_dict(raw)
    jobs = jobs_of(config)
    _refuse_impossible(config)
    print(jobs.submit())


def _refuse_impossible(config: Config) -> None:
    """A run that no cluster could train is found here, not by its pods. Raises `ConfigError`."""
    from pipeline.plan.estimate import estimate

    if config.manifest.kind == "train":
        estimate(config)


def logs(raw: dict[str, Any], overrides: list[str]) -> None:
    """What a submitted job prints, until it ends."""
    from pipeline.kubernetes.jobs import jobs_of

    for text in jobs_of(from_dict(raw)).logs():
        print(text, end="", flush=True)


def stop(raw: dict[str, Any], overrides: list[str]) -> None:
    """Ask a submitted job to write a checkpoint and end."""
    from pipeline.kubernetes.jobs import jobs_of

    print(jobs_of(from_dict(raw)).stop())


def data_show(raw: dict[str, Any], overrides: list[str]) -> None:
    """What a corpus holds, and how the plan goes through it."""
    from pipeline.data_show import describe_corpus

    config, folder, run = _corpus_of(raw, overrides)
    from pipeline.lineage import schedule_of

    print("\n".join(describe_corpus(config, folder, schedule_of(config, run))))


def data_inspect(raw: dict[str, Any], overrides: list[str]) -> None:
    """A row of a corpus as text, with its documents' boundaries."""
    from pipeline.data_show import describe_row

    source, row = from_dict(raw).source, from_dict(raw).row
    config, folder, _ = _corpus_of(raw, overrides)
    print("\n".join(describe_row(config, folder, source, row)))


def _corpus_of(raw: dict[str, Any], overrides: list[str]) -> tuple[Config, Path, RunFolder | None]:
    """The corpus of the run that `run=` names, or of the configuration; it must be prepared."""
    from pipeline.data.prepare import prepared_folder
    from pipeline.stages import dataset_folder

    config = from_dict(raw)
    if config.run:
        config, found = _existing(raw, overrides)
        return config, dataset_folder(config, found), found
    folder = prepared_folder(config.data, root_folder(config))
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: this corpus is not prepared yet; prepare it with the same overrides: "
            "pipeline prepare"
        )
    return config, folder, None


def data_at(raw: dict[str, Any], overrides: list[str]) -> None:
    """The documents that a step of a run saw."""
    from pipeline.data_at import describe_step

    config, found = _existing(raw, overrides)
    if config.one_step is None:
        raise ConfigError("step: name the step, from 0 on: step=<n>")
    try:
        for line in describe_step(config, found, config.one_step):
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _existing(
    raw: dict[str, Any], overrides: list[str], found: RunFolder | None = None
) -> tuple[Config, RunFolder]:
    """The run that `run=` names, or `found`, with its own configuration, but for what may be
    overridden."""
    _check_overrides(overrides)
    composed = from_dict(raw)
    if composed.run is None:
        raise ConfigError("run: name the run: run=<id> or run=latest")
    found = found or find_run(root_folder(composed), composed.run)
    own, now = load_config(found).to_dict(), composed.to_dict()
    for override in overrides:
        section, _, key = override.lstrip("+~").partition("=")[0].partition(".")
        key = key.partition(".")[0]
        if section in {"evals", "tracking"}:
            own[section] = {**own[section], key: now[section][key]} if key else now[section]
    own |= {key: now[key] for key in ("root", "export", "fidelity", "generate", "step")}
    return from_dict(own), found


def _check_overrides(overrides: list[str]) -> None:
    for override in overrides:
        section = override.lstrip("+~").partition("=")[0].partition(".")[0]
        if section not in OVERRIDABLE:
            raise ConfigError(
                f"{override}: a run's own configuration stands; here only "
                f"{', '.join(OVERRIDABLE)} can be given"
            )
