"""`compare +study=...`: run what is missing, gather the tables, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import yaml

from pipeline.config import Config, ConfigError, StudyConfig
from pipeline.runs import RunFolder, root_folder, write_whole
from pipeline.stages import tracker_safely
from pipeline.study import reuse, tables
from pipeline.study.fidelity import measure_fidelity, measured
from pipeline.study.memory import saved_bytes_per_token
from pipeline.study.plan import Compose, StudyRun, plan_study
from pipeline.study.queue import is_finished, run_all
from pipeline.study.report import lines, write_report
from pipeline.tracking import Tracker


def run_study(config: Config, compose: Compose, user: list[str]) -> None:
    """Bring a study to its end and report; where it is stopped, on the runs that have finished.

    Another call of an interrupted study goes on.

    Args:
        compose: makes a configuration of Hydra's overrides.
        user: what the command line said beside the study itself; all runs are told it.

    Raises:
        ConfigError: for an arm that cannot be had, before any run; tables that are not there.
        PermanentError: some runs failed.
    """
    study = config.study
    if study is None:
        raise ConfigError("study: choose one: compare +study=precision")
    if study.tables:
        _report_of(Path(study.tables), study)
        return
    root = root_folder(config)
    folder = root / "studies" / study.name
    runs = plan_study(study, compose, user)
    known = reuse.known(study, runs)
    todo = _to_run(runs, known, root)
    if study.reuse:
        reuse.check_data(known, runs, todo)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
    tracker = Tracker(config, root, RunFolder(folder))
    tracker.start()
    status = "FAILED"
    try:
        run_all(_below(todo, tracker), root, folder / "logs", study.parallel)
        if not known.fidelity:
            finished = [run for run in runs if is_finished(root, run)]
            measure_fidelity(finished, study, root, folder / "logs" / "fidelity.log")
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        finished = [run for run in runs if is_finished(root, run)]
        here = _with_memory(tables.collect(finished, root), finished)
        here = dataclasses.replace(here, fidelity=tuple(measured(finished, study, root)))
        gathered = reuse.merged(here, known)
        if gathered.rows:
            tables.write(gathered, folder)
            _report_of(folder, study)
            written = [folder / name for name in ("report.html", "figures", *tables.FILES)]
            tracker_safely(lambda: tracker.log_files(*written))
        tracker_safely(lambda: tracker.finish(status))


def _to_run(runs: Sequence[StudyRun], known: tables.Tables, root: Path) -> list[StudyRun]:
    """Runs that are not known; and trunks, known or not, of forks that have still to leave them."""
    have = {(row.arm, row.size, row.seed) for row in known.rows}
    todo = [run for run in runs if (run.arm, run.size, run.seed) not in have]
    trunks = {run.trunk for run in todo if not is_finished(root, run)}
    return [run for run in runs if run in todo or run.name in trunks]


def _below(runs: Sequence[StudyRun], tracker: Tracker) -> list[StudyRun]:
    """The runs as MLflow's children of the study."""
    if tracker.mlflow_run_id is None:
        return list(runs)
    parent = f"tracking.parent={tracker.mlflow_run_id}"
    return [dataclasses.replace(run, overrides=(*run.overrides, parent)) for run in runs]


def _with_memory(gathered: tables.Tables, runs: Sequence[StudyRun]) -> tables.Tables:
    """The same with the bytes that a step saves, measured once an arm and size."""
    measured: dict[tuple[str, str], float] = {}
    rows = []
    for row, run in zip(gathered.rows, runs, strict=True):
        key = (row.arm, row.size)
        if key not in measured:
            measured[key] = saved_bytes_per_token(run.config)
        figures = {**row.figures, "saved_bytes_per_token": measured[key]}
        rows.append(dataclasses.replace(row, figures=figures))
    return dataclasses.replace(gathered, rows=tuple(rows))


def _report_of(folder: Path, study: StudyConfig) -> None:
    read = tables.read(folder)
    print("\n".join(lines(write_report(read, study, folder), study)))
    print(f"report   {folder / 'report.html'}")
