"""A study's report, a function of its tables: HTML with figures, PNG beside it, and lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import StudyConfig
from pipeline.fidelity_report import rms
from pipeline.report import environment, save_figures
from pipeline.runs import write_whole
from pipeline.study.figures import draw_all
from pipeline.study.findings import PAPER_TOKENS_TO_MATCH, Findings, find
from pipeline.study.statistics import POWER
from pipeline.study.tables import Tables

UNITS = {"checkpoint_bytes": 1e6, "saved_bytes_per_token": 1e3}  # shown in MB and kB


def write_report(tables: Tables, study: StudyConfig, folder: Path) -> Findings:
    """Write report.html and figures/ below `folder`; returns what was found."""
    findings = find(tables, study)
    images = save_figures(draw_all(tables, findings, study), folder / "figures")
    html = (
        environment()
        .get_template("study.html.j2")
        .render(
            study=study,
            findings=findings,
            images=images,
            tables=tables,
            downstream=downstream(tables, findings.main),
            health=health(tables, findings.main),
            fidelity=fidelity(tables),
            paper_tokens=PAPER_TOKENS_TO_MATCH,
            needed=findings.noise.seeds_needed(study.effect) if findings.noise.freedom else None,
            power=POWER,
        )
    )
    write_whole(folder / "report.html", html)
    return findings


def lines(findings: Findings, study: StudyConfig) -> list[str]:
    """What the terminal says: each arm's gap, the noise, and every verdict."""
    shown = [
        f"{findings.num_runs} of {study.num_runs} runs",
        f"gaps to {study.baseline} at size {findings.main}, last {study.window:.0%} of steps:",
    ]
    for arm in findings.arms:
        gap = findings.gaps.get((arm, findings.main))
        loss = findings.losses.get((arm, findings.main))
        if loss is not None:
            shown.append(f"  {arm:<24} {loss:.4f}  {gap.percent() if gap else ''}".rstrip())
    noise = findings.noise
    if noise.freedom:
        needed = noise.seeds_needed(study.effect)
        shown.append(
            f"noise of a pair: {noise.deviation:.3%} ({noise.freedom} degrees of freedom); "
            f"{needed or 'over 1000'} seeds see {study.effect:.1%} with a chance of {POWER:.0%}"
        )
    for verdict in findings.verdicts:
        shown.append(f"{word(verdict.holds)}: {verdict.claim}: {verdict.evidence}")
    return shown


def word(holds: bool | None) -> str:
    return {True: "holds", False: "does not hold", None: "cannot be told"}[holds]


def downstream(tables: Tables, size: str) -> dict[str, dict[str, str]]:
    """Every figure of a run's end, by arm: the mean over seeds and its standard error."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in tables.rows:
        if row.size == size:
            for name, value in row.figures.items():
                values[row.arm][name].append(value / UNITS.get(name, 1.0))
    return {
        arm: {name: _mean(each) for name, each in figures.items()}
        for arm, figures in values.items()
    }


def _mean(values: Sequence[float]) -> str:
    """`1.234`, or `1.234 ± 0.005` of several."""
    mean = f"{np.mean(values):.3f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.3f}"


def health(tables: Tables, size: str) -> list[Mapping[str, Any]]:
    """By arm, operand and statistic: the median layer and the worst one, means over time."""
    values: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for each in tables.health:
        if each["size"] == size:
            key = (each["arm"], each["role"], each["statistic"])
            values[key][each["layer"]].append(each["mean"])
    rows: list[Mapping[str, Any]] = []
    for (arm, role, statistic), layers in sorted(values.items()):
        means = {layer: float(np.mean(seeds)) for layer, seeds in layers.items()}
        worst = max(means, key=lambda layer: means[layer])
        if means[worst] > 0:
            median = float(np.median(list(means.values())))
            rows.append(
                {
                    "arm": arm, "role": role, "statistic": statistic, "median": median,
                    "worst": means[worst], "layer": worst,
                }
            )  # fmt: skip
    return rows


def fidelity(tables: Tables) -> dict[str, dict[str, float]]:
    """At the last measured checkpoint, by recipe: each GEMM over all kinds, and the gradient."""
    last = max((row["tokens"] for row in tables.fidelity), default=0)
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in tables.fidelity:
        if row["tokens"] == last:
            values[row["recipe"]][row["gemm"]].append(row["relative_error"])
    return {
        recipe: {gemm: rms(errors) for gemm, errors in by_gemm.items()}
        for recipe, by_gemm in values.items()
    }
