"""The life of a run: begun or gone on with, worked on under a lock, and what it ends with.

`start` is what `run` and `train` do, `evaluate` what a job does for a run that exists; both `work`
on its folder, which keeps its status in `results.json` and MLflow.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import yaml

from pipeline.config import AROUND_A_RUN, Config, ConfigError, PermanentError, differences
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


def start(config: Config, stages: tuple[str, ...]) -> RunFolder:
    """Run the stages of a configuration: of a fresh run, or of the one that it goes on with."""
    from pipeline.preflight import check

    found = _former(config)
    check(config, stages, found)
    if found is None:
        label = config.experiment or config.precision.recipe
        found = RunFolder(root_folder(config) / (config.name or new_run_id(label)))
    work(config, found, stages, again=False)
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


def work(config: Config, found: RunFolder, stages: tuple[str, ...], *, again: bool) -> None:
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
            tracker_safely(lambda: tracker.finish(mlflow_status(found)))
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
    work(own, found, ("eval", "report"), again=True)
    refuse_incomplete(json.loads(found.results.read_text())["eval"])


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


def mlflow_status(found: RunFolder) -> str:
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
