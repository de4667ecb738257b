"""Gradient fidelity along the baseline's first run: it separates formats without luck.

Where losses need seeds, the error of one step against BF16 on the same weights and batches is
exact. It is measured at several of that run's checkpoints, as `compare fidelity` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.compare import fidelity
from pipeline.config import StudyConfig
from pipeline.fidelity_report import GEMMS, rms
from pipeline.runs import RunFolder
from pipeline.study.plan import StudyRun
from pipeline.train import checkpoint
from pipeline.train.schedule import Schedule

CHECKPOINTS = 4  # spread evenly over the run, its last one included
DRAWS = 8  # of each stochastic rounding: the study shows errors, not rounding's bias


def measure_fidelity(runs: Sequence[StudyRun], study: StudyConfig, root: Path, log: Path) -> None:
    """Measure the first of the baseline's runs among finished ones, which takes minutes.

    A checkpoint that was measured before is not measured again.
    """
    run = _run_of_baseline(runs, study)
    if run is None:
        return
    folder = RunFolder(root / run.name)
    missing = tuple(step for step, file in _files(folder).items() if not file.is_file())
    if missing:
        settings = dataclasses.replace(run.config.fidelity, steps=missing, num_draws=DRAWS)
        print(f"study: fidelity at steps {', '.join(map(str, missing))} of {run.name}", flush=True)
        with log.open("a") as out, contextlib.redirect_stdout(out):
            fidelity(dataclasses.replace(run.config, fidelity=settings), folder)


def measured(runs: Sequence[StudyRun], study: StudyConfig, root: Path) -> list[dict[str, Any]]:
    """Rows for fidelity.csv, of what `measure_fidelity` has left."""
    run = _run_of_baseline(runs, study)
    if run is None:
        return []
    per_step = Schedule.of(run.config.train, tuple(run.config.data.sources)).tokens_per_step
    return [
        {"tokens": step * per_step, **row}
        for step, file in _files(RunFolder(root / run.name)).items()
        if file.is_file()
        for row in rows_of(json.loads(file.read_text()))
    ]


def _run_of_baseline(runs: Sequence[StudyRun], study: StudyConfig) -> StudyRun | None:
    return next((run for run in runs if run.arm == study.baseline), None)


def _files(run: RunFolder) -> dict[int, Path]:
    """Where `compare fidelity` leaves what it measures at the chosen steps."""
    steps = chosen(checkpoint.steps_in(run.checkpoints))
    return {step: run.fidelity / f"step-{step:08}.json" for step in steps}


def chosen(steps: Sequence[int]) -> list[int]:
    """At most `CHECKPOINTS` of the steps, as evenly spread over the run as they lie."""
    left, found = list(steps), list[int]()
    count = min(CHECKPOINTS, len(steps))
    for place in range(count, 0, -1):  # from the end, which is always one
        wanted = steps[-1] * place / count
        found.append(min(left, key=lambda step: abs(step - wanted)))
        left.remove(found[-1])
    return sorted(found)


def rows_of(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row per recipe, kind of linear and GEMM, and one for the recipe's whole gradient.

    A kind is a linear's name within its block; its error is the root mean square over blocks.
    """
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for name, linear in result["linears"].items():
        kind = name.split(".", 2)[-1]
        for recipe, gemms in linear["gemms"].items():
            for gemm in GEMMS:
                errors[recipe, kind, gemm].append(gemms[gemm]["relative_error"])
    for recipe, each in result["recipes"].items():
        errors[recipe, "all", "gradient"] = [each["gradient"]["relative_error"]]
    for (recipe, kind, gemm), values in errors.items():
        error = float(f"{rms(values):.5g}")
        yield {"recipe": recipe, "kind": kind, "gemm": gemm, "relative_error": error}
