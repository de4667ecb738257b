"""The report's figures: each function draws one into a matplotlib Figure, or says that it cannot.

Drawn without pyplot, so that no window system and no global state take part. One colour means one
thing throughout: blue is the trained model, greys are what it is compared with.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from pipeline.curves import Branch, Curve

OURS = "#1f5fa8"
RECIPE = "#d1662a"
TRAINING = "#9db7d5"
INK = "#3b4252"
BASELINES = {"bigram": "#7b8494", "unigram": "#a9b0bc", "untrained": "#d5d9df"}
SERIES = ("#1f5fa8", "#d1662a", "#3c8d5a", "#8c5aa8", "#b3912f", "#5f7d8c")
WIDTH = 9.0  # inches
LEGEND_CHARACTERS = 100

Curves = Mapping[str, Curve]
Results = Mapping[str, Any]


def draw_all(curves: Curves, results: Results) -> dict[str, Figure]:
    """Every figure that the run has the numbers for, by name."""
    drawings: dict[str, Callable[[Curves, Results], Figure | None]] = {
        "loss": draw_loss,
        "validation": draw_validation,
        "schedule": draw_schedule,
        "domains": draw_domains,
        "continuation": draw_continuation,
        "quantization": draw_quantization,
    }
    drawn = {name: draw(curves, results) for name, draw in drawings.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def draw_loss(curves: Curves, results: Results) -> Figure | None:
    """Training loss, raw and smoothed, and the held-out loss in both precisions."""
    if "train/loss" not in curves:
        return None
    figure, (axes,) = new_figure(1, height=4.2)
    train = curves["train/loss"]
    unit, divisor = token_unit(curves)
    axes.plot(train.tokens / divisor, train.values, color=TRAINING, linewidth=0.7, alpha=0.8)
    smooth = train.smooth()
    axes.plot(smooth.tokens / divisor, smooth.values, color=OURS, linewidth=1.8, label="training")
    held_out = {"bf16": (INK, "o", "held out, BF16"), "recipe": (RECIPE, "x", "held out, recipe")}
    for precision, (color, marker, label) in held_out.items():
        if curve := curves.get(f"validation/loss_{precision}"):
            axes.plot(
                curve.tokens / divisor,
                curve.values,
                color=color,
                marker=marker,
                markersize=5,
                linewidth=1,
                linestyle=":",
                label=label,
            )
    axes.set_ylim(*_loss_limits(train.values))
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel(f"tokens trained ({unit})")
    _mark_phases(axes, results, divisor)
    axes.legend(loc="upper right")
    return figure


def draw_validation(curves: Curves, results: Results) -> Figure | None:
    """The held-out loss of each domain, in BF16."""
    ending = "/loss_bf16"
    domains = [name for name in curves if re.fullmatch(f"validation/.+{ending}", name)]
    if not domains:
        return None
    figure, (axes,) = new_figure(1, height=3.4)
    unit, divisor = token_unit(curves)
    for color, name in zip(_cycle(SERIES, len(domains)), domains, strict=True):
        curve = curves[name]
        label = name.removeprefix("validation/").removesuffix(ending)
        axes.plot(
            curve.tokens / divisor, curve.values, color=color, marker="o", markersize=4, label=label
        )
    axes.set_ylabel("held-out loss (nats per token)")
    axes.set_xlabel(f"tokens trained ({unit})")
    _mark_phases(axes, results, divisor)
    axes.legend(loc="upper right")
    return figure


def draw_schedule(curves: Curves, results: Results) -> Figure | None:
    """Learning rate and gradient norm."""
    panels = {
        "train/learning_rate": "learning rate",
        "train/grad_norm": "gradient norm",
    }
    panels = {name: label for name, label in panels.items() if name in curves}
    if not panels:
        return None
    figure, all_axes = new_figure(len(panels), height=2.8)
    unit, divisor = token_unit(curves)
    for axes, (name, label) in zip(all_axes, panels.items(), strict=True):
        curve = curves[name]
        noisy = name == "train/grad_norm"
        axes.plot(
            curve.tokens / divisor,
            curve.values,
            color=TRAINING if noisy else OURS,
            linewidth=0.7 if noisy else 1.8,
        )
        if noisy:
            smooth = curve.smooth()
            axes.plot(smooth.tokens / divisor, smooth.values, color=OURS, linewidth=1.8)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
        axes.set_ylabel(label)
        axes.set_xlabel(f"tokens trained ({unit})")
        _mark_phases(axes, results, divisor, labels=False)
    return figure


def draw_domains(curves: Curves, results: Results) -> Figure | None:
    """Bits per byte of each domain beside its baselines."""
    domains = results.get("eval", {}).get("domains")
    if not domains:
        return None
    kinds = {"trained": OURS} | BASELINES
    figure, (axes,) = new_figure(1, height=0.9 + 0.95 * len(domains))
    height = 0.8 / len(kinds)
    for place, (kind, color) in enumerate(kinds.items()):
        key = "bits_per_byte" if kind == "trained" else f"{kind}_bits_per_byte"
        values = [domain[key] for domain in domains.values()]
        bars = axes.barh(
            np.arange(len(domains)) + place * height, values, height * 0.88, color=color, label=kind
        )
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8.5, color=INK)
    axes.set_yticks(np.arange(len(domains)) + 1.5 * height, list(domains))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    axes.set_xlabel("bits per byte of held-out text (lower is better)")
    figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False)
    return figure


def draw_continuation(curves: Curves, results: Results) -> Figure | None:
    """Accuracy of the multiple-choice task, in all and by domain, with standard errors."""
    task = results.get("eval", {}).get("tasks", {}).get("continuation")
    if not task:
        return None
    per_domain = task.get("per_domain", {})
    rows = {"all": task} | per_domain
    names = list(rows)
    shares = [row["accuracy"] for row in rows.values()]
    errors = [row["standard_error"] for row in rows.values()]
    figure, (axes,) = new_figure(1, height=0.9 + 0.42 * len(names))
    colors = [OURS] + [TRAINING] * len(per_domain)
    axes.barh(names, shares, 0.6, color=colors, xerr=errors, error_kw={"ecolor": INK})
    for name, share, error in zip(names, shares, errors, strict=True):
        axes.annotate(
            f"{share:.0%}",
            (share + error, name),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.axvline(task["chance"], color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        "chance", (task["chance"], 1), (0, 3), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="center", fontsize=8.5, color=INK,
    )  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("questions answered rightly (whiskers: one standard error)")
    return figure


def draw_scores(evaluations: Sequence[Results]) -> Figure | None:
    """Each task's score against tokens trained, with standard errors; dotted: what guessing gets.

    None where fewer than two checkpoints were evaluated. Perplexities have other axes: left out.
    """
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for evaluation in evaluations:
        for name, task in evaluation["tasks"].items():
            if "perplex" not in task["metric"]:
                error = task["standard_error"] or 0.0
                point = (evaluation["tokens"], task["score"], error, task["chance"])
                points.setdefault(name, []).append(point)
    points = {name: each for name, each in points.items() if len(each) > 1}
    if not points:
        return None
    figure, (axes,) = new_figure(1, height=3.8)
    curves = {name: Curve(*np.array(each).T[:2]) for name, each in points.items()}
    unit, divisor = token_unit(curves)
    for color, (name, each) in zip(_cycle(SERIES, len(points)), points.items(), strict=True):
        tokens, scores, errors, chances = np.array(each).T
        axes.errorbar(
            tokens / divisor, scores, errors, color=color, marker="o", markersize=4, capsize=2,
            linewidth=1.4, label=name,
        )  # fmt: skip
        axes.axhline(chances[-1], color=color, linestyle=":", linewidth=1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("score")
    axes.set_xlabel(f"tokens trained ({unit})")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def draw_quantization(curves: Curves, results: Results) -> Figure | None:
    """Rounding error and flushed elements by operand: the median layer, and the span of all."""
    panels = {
        "error": "relative rounding error",
        "flushed": "elements rounded to zero",
    }
    found = {stat: _by_role(curves, stat) for stat in panels}
    if not any(found.values()):
        return None
    figure, all_axes = new_figure(len(panels), height=3.4)
    unit, divisor = token_unit(curves)
    for axes, (stat, label) in zip(all_axes, panels.items(), strict=True):
        for color, (role, layers) in zip(
            _cycle(SERIES, len(found[stat])), sorted(found[stat].items()), strict=True
        ):
            tokens = layers[0].tokens / divisor
            values = np.array([layer.values for layer in layers])
            axes.fill_between(tokens, values.min(0), values.max(0), color=color, alpha=0.12, lw=0)
            axes.plot(
                tokens,
                np.median(values, axis=0),
                color=color,
                marker="o",
                markersize=3,
                label=role.replace("_", " "),
            )
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel(f"tokens trained ({unit})")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def draw_family(branches: Sequence[Branch], run_id: str) -> Figure:
    """The loss of a run and its relatives as one tree: a child's begins at its parent's curve."""
    smooth = {branch.run_id: branch.loss.smooth() for branch in branches if branch.loss}
    figure, (axes,) = new_figure(1, height=3.8 + 0.2 * len(smooth))
    unit, divisor = token_unit(smooth)
    drawn = [branch for branch in branches if branch.run_id in smooth]
    drawn.sort(key=lambda branch: branch.run_id != run_id)  # the run itself first, in our colour
    for color, branch in zip(_cycle(SERIES, len(drawn)), drawn, strict=True):
        curve, stem = smooth[branch.run_id], smooth.get(branch.parent or "")
        tokens, values = curve.tokens / divisor, curve.values
        if stem is not None and len(stem.values):
            place = float(np.interp(branch.fork_tokens, stem.tokens, stem.values))
            tokens, values = (
                np.append(branch.fork_tokens / divisor, tokens),
                np.append(place, values),
            )
            axes.plot(tokens[:1], values[:1], "o", color=color, markersize=5, zorder=3)
        width = 2.2 if branch.run_id == run_id else 1.3
        axes.plot(tokens, values, color=color, linewidth=width, label=_branch_label(branch))
    axes.set_ylim(*_loss_limits(np.concatenate([curve.values for curve in smooth.values()])))
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel(f"tokens trained ({unit})")
    figure.legend(loc="outside upper left", frameon=False, fontsize=8.5)
    return figure


def draw_fidelity(result: Results) -> Figure:
    """What `compare fidelity` measured: each recipe's error by GEMM, and bias over draws."""
    figure, (errors, draws) = new_figure(2, height=4.4)
    recipes = list(result["recipes"])
    for color, (gemm, label) in zip(
        SERIES, {"fprop": "Fprop", "dgrad": "Dgrad", "wgrad": "Wgrad"}.items(), strict=False
    ):
        values = [result["recipes"][name][gemm] for name in recipes]
        errors.plot(values, recipes, "o", color=color, label=label, clip_on=False)
    errors.invert_yaxis()
    errors.set_xlim(left=0)
    errors.xaxis.set_major_formatter(PercentFormatter(1.0))
    errors.set_xlabel("relative error against BF16, each linear alone")
    errors.legend(loc="upper right")
    for color, (label, each) in zip(SERIES, result["rounding"].items(), strict=False):
        if len(each["draws"]) == 1:  # nothing is drawn: the same at any number
            draws.axhline(each["bias"][0], color=color, linestyle="--", label=label)
            continue
        draws.loglog(each["draws"], each["bias"], "o-", color=color, label=label)
        draws.axhline(each["floor"], color=color, linestyle=":", linewidth=1)
    draws.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    draws.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    draws.set_xlabel("draws of a gradient's rounding (dotted: floors)")
    draws.set_ylabel("error of their mean")
    draws.legend(loc="lower left", bbox_to_anchor=(0, 0.1))
    return figure


def _branch_label(branch: Branch) -> str:
    """A run's id, and how it differs from its parent."""
    if branch.parent is None:
        return branch.run_id
    changes = [textwrap.shorten(change, 48, placeholder=" ...") for change in branch.difference]
    text = f"{branch.run_id}, from step {branch.fork_step:,}: "
    text += "; ".join(changes) or "nothing changed"
    return textwrap.shorten(text, LEGEND_CHARACTERS, placeholder=" ...")


def _by_role(curves: Curves, stat: str) -> dict[str, list[Curve]]:
    """Curves named quant/<layer>/<role>/<stat>, by role; layers measured as often as the first."""
    roles: dict[str, list[Curve]] = {}
    for name, curve in curves.items():
        if name.startswith("quant/") and name.endswith(f"/{stat}"):
            layers = roles.setdefault(name.split("/")[-2], [])
            if not layers or len(layers[0].tokens) == len(curve.tokens):
                layers.append(curve)
    return roles


def new_figure(columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure in the reports' style with so many panels side by side; height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", dpi=150)
    grid = figure.subplots(1, columns, squeeze=False)[0]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b7bdc8")
        axes.tick_params(colors=INK, labelsize=9)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.grid(color="#eceef2", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, list(grid)


def _mark_phases(axes: Axes, results: Results, divisor: float, labels: bool = True) -> None:
    """A vertical line where each phase after the first begins."""
    for phase in results.get("train", {}).get("phases", [])[1:]:
        place = phase["start_tokens"] / divisor
        axes.axvline(place, color="#8a93a3", linestyle="--", linewidth=0.9, zorder=1)
        if labels:
            axes.annotate(
                phase["name"], (place, 1), (0, 3), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", fontsize=8.5, color=INK,
            )  # fmt: skip


def token_unit(curves: Curves) -> tuple[str, float]:
    """The unit of the token axis, and how many tokens it is."""
    most = max(curve.tokens[-1] for curve in curves.values())
    for name, size in (("trillions", 1e12), ("billions", 1e9), ("millions", 1e6)):
        if most >= size:
            return name, size
    return "thousands", 1e3


def _loss_limits(values: np.ndarray) -> tuple[float, float]:
    """From the least loss to the first, with a margin; what is not finite is left out."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(max(finite[0], np.percentile(finite, 99)))
    margin = 0.06 * max(high - low, 0.1)
    return low - margin, high + margin


def _cycle(colors: Sequence[str], count: int) -> list[str]:
    return [colors[i % len(colors)] for i in range(count)]
