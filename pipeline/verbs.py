"""What each verb of the command line does, given the composed configuration.

`run`, `prepare` and `train` start a run (or resume one); `eval`, `report`, `compare fidelity`,
`export`, `generate`, `status`, `data at` and `track` work on a run that exists, with its own
configuration: only `OVERRIDABLE` sections and keys may be given there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import (
    AROUND_A_RUN,
    Config,
    ConfigError,
    PermanentError,
    UnreachableError,
    differences,
    from_dict,
)
from pipeline.runs import (
    RunFolder,
    find_run,
    list_runs,
    load_config,
    locked,
    new_run_id,
    root_folder,
    write_whole,
)

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
    _work(config, found, ("eval", "report"), again=True)
    command.refuse_incomplete(json.loads(found.results.read_text())["eval"])


def report(raw: dict[str, Any], overrides: list[str]) -> None:
    """The report of an existing run."""
    config, found = _existing(raw, overrides)
    _work(config, found, ("report",), again=True)


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
            tracker_safely(lambda: tracker.finish(_mlflow_status(found)))


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
            tracker_safely(lambda: tracker.finish(_mlflow_status(found)))


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
            tracker.finish(_mlflow_status(found))
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


def start(config: Config, stages: tuple[str, ...]) -> RunFolder:
    """Run the stages of a configuration: of a fresh run, or of the one that it goes on with."""
    from pipeline.preflight import check

    found = _former(config)
    check(config, stages, found)
    if found is None:
        label = config.experiment or config.precision.recipe
        found = RunFolder(root_folder(config) / (config.name or new_run_id(label)))
    _work(config, found, stages, again=False)
    return found


def _former(config: Config) -> RunFolder | None:
    """The run to go on with, which must have this configuration; None for a fresh one.

    Raises `ConfigError`.
    """
    named = RunFolder(root_folder(config) / config.name) if config.name else None
    if config.resume:
        found = _resumed(config)
    elif named and named.config.is_file():
        found = _of_this_configuration(config, named)
    else:
        return None
    if found.failure.is_file():
        error = json.loads(found.failure.read_text())["error"]
        raise ConfigError(
            f"run {found.id} failed for good and is not tried again: {error}. Start a fresh run; "
            f"or remove {found.failure} to try all the same"
        )
    return found


def _of_this_configuration(config: Config, found: RunFolder) -> RunFolder:
    former = load_config(found)
    if former.fingerprint() != config.fingerprint():
        differing = differences(former.to_dict(), config.to_dict(), AROUND_A_RUN)
        raise ConfigError(
            f"run {found.id}: the configuration differs from that run's in "
            f"{', '.join(differing)}; give the same overrides as then, or start a child of it: "
            f"train.fork_from={found.id}@<step>"
        )
    return found


def _resumed(config: Config) -> RunFolder:
    """The run that `resume` names, or with `true` the newest unfinished one of this kind."""
    root = root_folder(config)
    if config.resume is not True:
        return _of_this_configuration(config, find_run(root, str(config.resume)))
    for found in reversed(list_runs(root)):
        if _status(found) != "finished" and _is_of(found, config.fingerprint()):
            return found
    raise ConfigError(
        f"resume=true: no unfinished run of this configuration in {root}; start a fresh one "
        "without resume, or name a run: resume=<id>"
    )


def _work(config: Config, found: RunFolder, stages: tuple[str, ...], *, again: bool) -> None:
    """Run stages on a run's folder, tracked, with the status kept in results and MLflow.

    again: whether these are later stages of a run that exists, whose status stays what it was.
    """
    from pipeline.stages import run_stages, tracker_safely, update_results
    from pipeline.tracking import Tracker

    fresh = not found.config.is_file()
    before = set(found.path.iterdir()) if found.path.is_dir() else None
    if fresh:
        found.path.mkdir(parents=True, exist_ok=True)
        if config.train.fork_from:
            from pipeline.lineage import fork, write_lineage

            write_lineage(found, fork(config))
        if config.train.init_from:
            from pipeline.warm_start import find_source, write_warm_start

            write_warm_start(found, find_source(config))
        write_whole(found.config, yaml.safe_dump(config.to_dict(), sort_keys=False))
    tracker = Tracker(config, root_folder(config), found)
    with locked(found):
        print(f"run {found.id}", flush=True)
        former = _status(found)
        try:
            tracker.start()
        except ConfigError:
            if fresh:
                _remove_new(found.path, before)
            raise
        entries = {
            "run_id": found.id,
            "mlflow_run_id": tracker.mlflow_run_id,
            "status": former if again else "running",
            "experiment": config.experiment,
            "precision": config.precision.recipe,
            "fingerprint": config.fingerprint(),
        }
        update_results(found, entries)
        status = "failed"
        try:
            run_stages(config, found, tracker, stages, again=again)
            status = "finished"
        except (KeyboardInterrupt, SystemExit):  # Ray's own handler of an interrupt exits
            status = "interrupted"
            alone = again or config.name  # nothing to add that says which run is meant
            how = "the same command" + ("" if alone else f" and resume={found.id}")
            print(f"\ninterrupted; go on with {how}")
            raise KeyboardInterrupt from None
        except PermanentError as error:
            found.failure.write_text(json.dumps({"error": str(error)}))
            raise
        finally:
            try:
                update_results(found, {"status": former if again else status})
            except OSError:  # a full disk: what it stopped is what is told
                if status == "finished":
                    raise
            tracker_safely(lambda: tracker.finish(_mlflow_status(found)))
    _print_end(config, found, tracker.uri)


def _remove_new(folder: Path, before: set[Path] | None) -> None:
    """Leave a folder as it was: with these entries, or (None) not there."""
    if before is None:
        shutil.rmtree(folder)
        return
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def evaluate(config: Config) -> None:
    """`eval` for a job: of the run that `name` names, with its own configuration but for where and
    how it is evaluated. Raises `IncompleteError` where tasks lack their data.
    """
    from pipeline.evaluation.command import refuse_incomplete

    found = RunFolder(root_folder(config) / str(config.name))
    if not found.config.is_file():
        raise ConfigError(
            f"name={config.name}: no such run in {root_folder(config)}; train it first"
        )
    own = dataclasses.replace(
        load_config(found),
        root=config.root,
        evals=config.evals,
        tracking=config.tracking,
        cluster=config.cluster,
    )
    _work(own, found, ("eval", "report"), again=True)
    refuse_incomplete(json.loads(found.results.read_text())["eval"])


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


def _is_of(found: RunFolder, fingerprint: str) -> bool:
    """Whether a run has that configuration; one that cannot be read has not."""
    try:
        return load_config(found).fingerprint() == fingerprint
    except ConfigError:
        return False


def _status(found: RunFolder) -> str:
    if not found.results.is_file():
        return "started"
    try:
        return json.loads(found.results.read_text()).get("status", "started")
    except ValueError as error:
        raise ConfigError(f"{found.results}: damaged ({error}); remove it to go on") from error


def _mlflow_status(found: RunFolder) -> str:
    return {"finished": "FINISHED", "interrupted": "KILLED"}.get(_status(found), "FAILED")


def _print_end(config: Config, found: RunFolder, uri: str) -> None:
    """Where things are and what to type next."""
    print(f"\nrun      {found.id}")
    places = {"report": found.report, "results": found.results, "checkpoints": found.checkpoints}
    for name, path in places.items():
        if path.exists():
            print(f"{name:<8} {path}")
    python = _interpreter()
    print("\nnext:")
    if not config.tracking.offline:
        print(f"  {python} -m mlflow ui --backend-store-uri {uri}")
    print(f"  {python} -m pipeline eval run={found.id}")
    print(f"  {python} -m pipeline run precision=bf16")


def _interpreter() -> str:
    """What to type for this Python: its name where that finds it, else its path."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = Path(sys.executable)
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)
