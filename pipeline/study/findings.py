"""What a study found, from its tables alone: gaps, ablations, switches, tokens to match, verdicts.

Nothing here is tuned to the paper: a verdict is what the interval says, "cannot be told" included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config import ConfigError, StudyConfig
from pipeline.fidelity_report import Verdict
from pipeline.study.statistics import (
    Estimate,
    Noise,
    Trend,
    final_loss,
    gap_curve,
    paired,
    tokens_to_match,
    trend,
)
from pipeline.study.tables import TRAIN, Row, Tables

PAPER = "nvfp4_paper"  # the recipe that the ablations change in one thing
PRODUCTION = "nvfp4"
MXFP4 = "mxfp4"
LATE = {"late_bf16": 1.0, "late_bf16_forward_only": 1 / 3}  # share of a step's GEMM FLOPs in BF16
PAPER_TOKENS_TO_MATCH = 0.36  # arXiv 2509.25149, section 5: MXFP4 needs 36% more tokens (8B, 1T)


@dataclass(frozen=True)
class Switch:
    """A late switch of precision. gaps: just before it, at the end, and at the end without it.

    over_half: the gap at the end less half of the one without the switch, paired by seed.
    """

    arm: str
    share: float  # of all GEMM FLOPs that ran in BF16
    before: float
    after: Estimate
    unswitched: Estimate
    over_half: Estimate


@dataclass(frozen=True)
class Findings:
    """All that the report shows. Keys of `gaps`: (arm, size)."""

    sizes: tuple[str, ...]
    arms: tuple[str, ...]
    losses: dict[tuple[str, str], float]
    gaps: dict[tuple[str, str], Estimate]
    noise: Noise
    ablations: dict[str, Estimate]
    trends: dict[str, Trend | None]
    switches: tuple[Switch, ...]
    matching: dict[str, Any]
    verdicts: tuple[Verdict, ...]
    num_runs: int

    @property
    def main(self) -> str:
        """The study's first size, of which single figures tell."""
        return self.sizes[0]


def find(tables: Tables, study: StudyConfig) -> Findings:
    """Compute everything. Arms and sizes without runs are left out.

    Raises:
        ConfigError: no run is of the study.
    """
    present = {(row.arm, row.size) for row in tables.rows}
    sizes = tuple(size for size in study.sizes if any(size == each for _, each in present))
    if not sizes:
        raise ConfigError(f"study {study.name}: its tables hold no run of its sizes")
    arms = tuple(arm for arm in study.arms if any(arm == each for each, _ in present))
    others = [arm for arm in arms if arm != study.baseline]
    by_pair = {
        (arm, size): paired(tables, arm, study.baseline, size, study.window)
        for arm in others
        for size in sizes
    }
    by_pair = {key: gaps for key, gaps in by_pair.items() if gaps}
    main = sizes[0]
    noise = Noise.pooled([list(g.values()) for (_, size), g in by_pair.items() if size == main])
    gaps = {
        (arm, size): _noise_at(by_pair, size).estimate(list(values.values()))
        for (arm, size), values in by_pair.items()
    }
    losses = {
        (arm, size): float(
            np.mean(
                [
                    final_loss(tables.curves[row.run][TRAIN], study.window)
                    for row in tables.rows
                    if (row.arm, row.size) == (arm, size)
                ]
            )
        )
        for arm, size in present
    }
    ablations = _ablations(tables, study, others, main)
    trends = {arm: _trend(tables, by_pair, arm) for arm in others}
    switches = tuple(_switches(tables, study, by_pair, gaps, main))
    matching = _matching(tables, study, main)
    verdicts = _verdicts(gaps, ablations, switches, main) + _fidelity_verdicts(tables)
    return Findings(
        sizes, arms, losses, gaps, noise, ablations, trends, switches, matching, tuple(verdicts),
        len(tables.rows),
    )  # fmt: skip


def _noise_at(by_pair: dict[tuple[str, str], dict[int, float]], size: str) -> Noise:
    """A size's own noise, or that of all sizes together where it has one seed."""
    own = Noise.pooled([list(g.values()) for (_, each), g in by_pair.items() if each == size])
    return own if own.freedom else Noise.pooled([list(g.values()) for g in by_pair.values()])


def _ablations(
    tables: Tables, study: StudyConfig, others: Sequence[str], size: str
) -> dict[str, Estimate]:
    """Each arm's loss against the paper's recipe, paired: below zero is better than it."""
    against = {
        arm: paired(tables, arm, PAPER, size, study.window) for arm in others if arm != PAPER
    }
    against = {arm: gaps for arm, gaps in against.items() if gaps}
    noise = Noise.pooled([list(gaps.values()) for gaps in against.values()])
    return {arm: noise.estimate(list(gaps.values())) for arm, gaps in against.items()}


def _trend(
    tables: Tables, by_pair: dict[tuple[str, str], dict[int, float]], arm: str
) -> Trend | None:
    """The gap over log10(parameters), one point for each run."""
    parameters = {row.size: row.parameters for row in tables.rows}
    points = [
        (float(parameters[size]), gap)
        for (each, size), gaps in by_pair.items()
        if each == arm
        for gap in gaps.values()
    ]
    return trend([size for size, _ in points], [gap for _, gap in points])


def _switches(
    tables: Tables,
    study: StudyConfig,
    by_pair: dict[tuple[str, str], dict[int, float]],
    gaps: dict[tuple[str, str], Estimate],
    size: str,
) -> list[Switch]:
    trunks = {
        arm: trunk
        for arm in LATE
        if (arm, size) in by_pair
        and (trunk := study.arms[arm].trunk or "")
        and (trunk, size) in by_pair
    }
    seeds = {
        arm: sorted(by_pair[arm, size].keys() & by_pair[trunk, size].keys())
        for arm, trunk in trunks.items()
    }
    over_half = {
        arm: [by_pair[arm, size][s] - by_pair[trunk, size][s] / 2 for s in seeds[arm]]
        for arm, trunk in trunks.items()
        if seeds[arm]
    }
    noise = Noise.pooled(list(over_half.values()))
    rows = {(row.arm, row.size, row.seed): row for row in tables.rows}
    found = []
    for arm, halves in over_half.items():
        trunk = trunks[arm]
        forked = [rows[arm, size, seed] for seed in seeds[arm]]
        before = [
            _gap_before(
                tables, row, rows[trunk, size, row.seed],
                rows[study.baseline, size, row.seed], study.window,
            )
            for row in forked
        ]  # fmt: skip
        after_fork = 1 - (forked[0].fork_tokens or 0) / forked[0].tokens
        found.append(
            Switch(
                arm=arm,
                share=LATE[arm] * after_fork,
                before=float(np.mean(before)),
                after=gaps[arm, size],
                unswitched=gaps[trunk, size],
                over_half=noise.estimate(halves),
            )
        )
    return found


def _gap_before(tables: Tables, forked: Row, trunk: Row, base: Row, window: float) -> float:
    """The trunk's mean gap over the last `window` of the run's tokens before the fork."""
    curve = gap_curve(tables, trunk, base)
    fork = forked.fork_tokens or 0
    shown = (curve.tokens <= fork) & (curve.tokens > fork - window * forked.tokens)
    return float(curve.values[shown].mean()) if shown.any() else math.nan


def _matching(tables: Tables, study: StudyConfig, size: str) -> dict[str, Any]:
    """Tokens that MXFP4 needs to reach NVFP4's final loss, by runs of the same model and seeds."""
    goal = [row for row in tables.rows if (row.arm, row.size) == (PAPER, size)]
    if not goal:
        return {}
    parameters, tokens = goal[0].parameters, goal[0].tokens
    lengths: dict[float, list[Row]] = defaultdict(list)
    for row in tables.rows:
        if row.arm == MXFP4 and row.parameters == parameters:
            lengths[float(row.tokens)].append(row)
    seeds = {row.seed for row in goal}.intersection(
        *({row.seed for row in rows} for rows in lengths.values())
    )
    if len(lengths) < 2 or not seeds:
        return {}

    def loss(rows: Sequence[Row]) -> float:
        curves = [tables.curves[row.run][TRAIN] for row in rows if row.seed in seeds]
        return float(np.mean([final_loss(curve, study.window) for curve in curves]))

    needed = tokens_to_match(loss(goal), {length: loss(rows) for length, rows in lengths.items()})
    more = needed / tokens - 1 if needed else None
    return {
        "tokens": tokens, "needed": needed, "more": more, "longest": max(lengths),
        "num_seeds": len(seeds),
    }  # fmt: skip


def _verdicts(
    gaps: dict[tuple[str, str], Estimate],
    ablations: dict[str, Estimate],
    switches: Sequence[Switch],
    size: str,
) -> list[Verdict]:
    found = [
        _below(
            gaps.get((PRODUCTION, size)), 0.005, "NVFP4 within 0.5% of BF16, production's recipe"
        ),
        _below(gaps.get((PAPER, size)), 0.015, "NVFP4 within 1.5% of BF16, paper's recipe"),
    ]
    claim = "MXFP4's gap is larger than NVFP4's, by more than the noise"
    found.append(_above(ablations.get(MXFP4), claim))
    for arm in ("no_rht", "no_sr", "no_2d", "all_layers"):
        if arm in ablations:
            found.append(_above(ablations[arm], f"{arm} is worse than the paper's recipe"))
    for switch in switches:
        claim = f"{switch.arm} at least halves the gap"
        evidence = (
            f"{switch.unswitched.percent()} without it, {switch.after.percent()} with it; with it "
            f"less half of without, paired: {switch.over_half.percent()}"
        )
        told = switch.unswitched.differs and switch.over_half.differs
        found.append(Verdict(claim, switch.over_half.mean < 0 if told else None, evidence))
    return found


def _below(gap: Estimate | None, bound: float, claim: str) -> Verdict:
    if gap is None:
        return Verdict(claim, None, "no such run")
    holds = None if not (gap.high < bound or gap.low > bound) else gap.high < bound
    return Verdict(claim, holds, gap.percent())


def _above(difference: Estimate | None, claim: str) -> Verdict:
    if difference is None:
        return Verdict(claim, None, "no such run")
    holds = difference.mean > 0 if difference.differs else None
    return Verdict(claim, holds, f"{difference.percent()} against the paper's recipe")


def _fidelity_verdicts(tables: Tables) -> list[Verdict]:
    """What the gradient's fidelity says of formats, over all measured checkpoints."""
    errors = {
        (row["tokens"], row["recipe"], row["kind"], row["gemm"]): row["relative_error"]
        for row in tables.fidelity
    }
    found = []
    for recipe in (PRODUCTION, PAPER):
        pairs = [
            (error, errors[tokens, MXFP4, kind, gemm])
            for (tokens, each, kind, gemm), error in errors.items()
            if each == recipe and gemm != "fprop" and (tokens, MXFP4, kind, gemm) in errors
        ]
        claim = f"{recipe}'s gradients are closer to BF16's than MXFP4's, in every kind of linear"
        lower = sum(ours < theirs for ours, theirs in pairs)
        evidence = f"in {lower} of {len(pairs)} errors: kinds, Dgrad, Wgrad and whole, checkpoints"
        if pairs:
            found.append(Verdict(claim, lower == len(pairs), evidence))
    return found
