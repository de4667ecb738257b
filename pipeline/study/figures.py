"""A study's figures."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from pipeline.config import StudyConfig
from pipeline.curves import Curve
from pipeline.figures import SERIES, new_figure, token_unit
from pipeline.study.findings import Findings
from pipeline.study.statistics import gap_curve
from pipeline.study.tables import TRAIN, Tables

FORMATS = ("fp8_block", "mxfp8", "nvfp4", "nvfp4_paper", "mxfp4")  # recipes of the fidelity figure
SHOWN = 6  # arms in a figure of curves: more cannot be told apart by colour


def draw_all(tables: Tables, findings: Findings, study: StudyConfig) -> dict[str, Figure]:
    """Every figure by name."""
    drawn = {
        "loss": draw_loss(tables, findings, study),
        "gaps": draw_gaps(findings),
        "sizes": draw_sizes(tables, findings, study),
        "fidelity": draw_fidelity_curve(tables, study),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def draw_loss(tables: Tables, findings: Findings, study: StudyConfig) -> Figure:
    """Training loss by tokens, and the gap to the baseline on the same batches; means of seeds."""
    figure, (losses, gaps) = new_figure(2, height=4.0)
    rows = [row for row in tables.rows if row.size == findings.main]
    base = {row.seed: row for row in rows if row.arm == study.baseline}
    unit, divisor = token_unit({row.run: tables.curves[row.run][TRAIN] for row in rows})
    for color, arm in zip(SERIES, findings.arms[:SHOWN], strict=False):
        own = [row for row in rows if row.arm == arm]
        if not own:
            continue
        loss = mean_curve([tables.curves[row.run][TRAIN] for row in own])
        losses.plot(loss.tokens / divisor, loss.values, color=color, label=arm, linewidth=1.3)
        pairs = [gap_curve(tables, row, base[row.seed]) for row in own if row.seed in base]
        if arm != study.baseline and pairs:
            gap = mean_curve(pairs).smooth(0.1)
            gaps.plot(gap.tokens / divisor, 100 * gap.values, color=color, label=arm)
    losses.set_ylabel("training loss (nats per token)")
    gaps.set_ylabel(f"gap to {study.baseline} (%)")
    gaps.axhline(0, color="#7b8494", linewidth=0.8)
    for axes in (losses, gaps):
        axes.set_xlabel(f"tokens trained ({unit})")
    losses.legend(loc="upper right", fontsize=8.5)
    return figure


def draw_gaps(findings: Findings) -> Figure:
    """Every arm's final gap with its interval, at the main size."""
    rows = {arm: gap for (arm, size), gap in findings.gaps.items() if size == findings.main}
    figure, (axes,) = new_figure(1, height=1.0 + 0.36 * len(rows))
    for place, gap in enumerate(rows.values()):
        color = SERIES[0] if gap.differs else "#7b8494"
        axes.plot(100 * gap.mean, place, "o", color=color)
        if gap.differs is not None:
            axes.plot([100 * gap.low, 100 * gap.high], [place, place], color=color)
        axes.annotate(
            f"n={gap.num_seeds}", (1, place), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.axvline(0, color="#7b8494", linewidth=0.8)
    axes.set_xlabel("gap of the final training loss to the baseline (%), 95% interval")
    return figure


def draw_sizes(tables: Tables, findings: Findings, study: StudyConfig) -> Figure | None:
    """The gap by model size, for arms that have several."""
    parameters = {row.size: row.parameters for row in tables.rows}
    several = {
        arm: [
            (size, findings.gaps[arm, size])
            for size in findings.sizes
            if (arm, size) in findings.gaps
        ]
        for arm in findings.arms
    }
    several = {arm: each for arm, each in several.items() if len(each) > 1}
    if not several:
        return None
    figure, (axes,) = new_figure(1, height=3.4)
    for color, (arm, each) in zip(SERIES, several.items(), strict=False):
        x = [parameters[size] / 1e6 for size, _ in each]
        y = np.array([100 * gap.mean for _, gap in each])
        ends = np.array([[100 * gap.low, 100 * gap.high] for _, gap in each]).T
        spans = np.nan_to_num(np.abs(ends - y))
        axes.errorbar(x, y, yerr=spans, color=color, label=arm, marker="o", linewidth=1, capsize=3)
    axes.set_xscale("log")
    axes.axhline(0, color="#7b8494", linewidth=0.8)
    axes.set_xlabel("parameters (millions)")
    axes.set_ylabel(f"gap to {study.baseline} (%)")
    axes.legend(loc="best")
    return figure


def draw_fidelity_curve(tables: Tables, study: StudyConfig) -> Figure | None:
    """Relative error of the whole gradient by tokens that the baseline's run had seen."""
    errors = [row for row in tables.fidelity if row["gemm"] == "gradient"]
    if not errors:
        return None
    figure, (axes,) = new_figure(1, height=3.0)
    for color, recipe in zip(SERIES, FORMATS, strict=False):
        own = [row for row in errors if row["recipe"] == recipe]
        tokens = [row["tokens"] / 1e6 for row in own]
        percents = [100 * row["relative_error"] for row in own]
        axes.plot(tokens, percents, "o-", color=color, label=recipe, linewidth=1.3)
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlabel(f"tokens trained in {study.baseline} (millions)")
    axes.set_ylabel("error of the gradient (%)")
    axes.legend(loc="upper center", ncols=len(FORMATS), fontsize=8.5)
    return figure


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean of curves where all of them have a value."""
    common = curves[0].tokens
    for curve in curves[1:]:
        common = np.intersect1d(common, curve.tokens)
    values = [curve.values[np.isin(curve.tokens, common)] for curve in curves]
    return Curve(common, np.mean(values, axis=0))
