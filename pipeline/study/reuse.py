"""Runs of the same study that finished elsewhere, taken from their tables instead of run again.

A run is known by arm, size and seed, and taken where its configuration has the same fingerprint
(which does not say where its corpus lies) and its corpus the same content. So machines share a
study, and one outlasts the machine that it began on: `study.reuse=[<folder>]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config import ConfigError, StudyConfig
from pipeline.data.prepare import prepare
from pipeline.data.shards import read_manifest
from pipeline.runs import root_folder
from pipeline.study import tables
from pipeline.study.plan import StudyRun
from pipeline.study.tables import Row, Tables


def known(study: StudyConfig, runs: Sequence[StudyRun]) -> Tables:
    """What the tables of `study.reuse` hold of the planned runs; of a run in several, the first's.

    Rows of another configuration are left out, and named on the terminal. Fidelity comes with the
    baseline's runs.

    Raises:
        ConfigError: a folder holds no tables.
    """
    planned = {(run.arm, run.size, run.seed): run.configuration for run in runs}
    found = Tables((), {}, ())
    for folder in study.reuse:
        read = tables.read(Path(folder))
        here = [row for row in read.rows if _key(row) in planned]
        same = [row for row in here if row.configuration == planned[_key(row)]]
        print(f"study: {len(same)} runs are known from {folder}", flush=True)
        if len(same) < len(here):
            others = ", ".join(row.run for row in here if row not in same)
            print(f"study: of another configuration, and so not taken: {others}", flush=True)
        taken = only(read, [row.run for row in same])
        if not any(row.arm == study.baseline for row in same):
            taken = replace(taken, fidelity=())
        found = merged(found, taken)
    return found


def only(of: Tables, names: Sequence[str]) -> Tables:
    """The rows, curves and health of some runs; fidelity as it is."""
    return replace(
        of,
        rows=tuple(row for row in of.rows if row.run in names),
        curves={name: curve for name, curve in of.curves.items() if name in names},
        health=tuple(each for each in of.health if each["run"] in names),
    )


def merged(first: Tables, second: Tables) -> Tables:
    """Both together. Of a run in both, and of fidelity, the first's."""
    have = {_key(row) for row in first.rows}
    rest = only(second, [row.run for row in second.rows if _key(row) not in have])
    return Tables(
        first.rows + rest.rows,
        {**first.curves, **rest.curves},
        first.health + rest.health,
        first.fidelity or rest.fidelity,
    )


def check_data(of: Tables, planned: Sequence[StudyRun], todo: Sequence[StudyRun]) -> None:
    """All runs of one corpus read the same content: known ones, and those to come, whose corpora
    are prepared now.

    Raises:
        ConfigError: they do not; the message names a known run.
    """
    contents: dict[str, tuple[str, str]] = {}  # by corpus: who read it, and its content
    for config in {str(run.config.data): run.config for run in todo}.values():
        folder = prepare(config.data, root_folder(config), address=config.cluster.address)
        contents[str(config.data)] = ("the corpus here", read_manifest(folder)["content_hash"])
    data = {_key(run): str(run.config.data) for run in planned}
    for row in of.rows:
        who, content = contents.setdefault(data[_key(row)], (row.run, row.data))
        if row.data != content:
            raise ConfigError(
                f"study.reuse: {row.run} was trained on other data (content {row.data[:12]}) than "
                f"{who} ({content[:12]}); prepare the same files, or do not reuse its tables"
            )


def _key(run: StudyRun | Row) -> tuple[str, str, int]:
    return run.arm, run.size, run.seed
