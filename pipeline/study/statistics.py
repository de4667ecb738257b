"""Paired gaps between arms, their intervals, and the power to see a difference.

A pair is two runs of the same size and seed: the same batches in the same order from the same
initial weights. Their difference has far less noise than either's loss. What is left is measured
across seeds: its standard deviation is pooled over all arms that have several seeds, so that an arm
with one seed has an interval too (Student's t with the pooled degrees of freedom).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from pipeline.curves import Curve
from pipeline.study.tables import TRAIN, Row, Tables

CONFIDENCE = 0.95
POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval; both ends are NaN where no noise is known."""

    mean: float
    low: float
    high: float
    num_seeds: int

    @property
    def differs(self) -> bool | None:
        """Whether zero lies outside; None where that is not known."""
        return None if math.isnan(self.low) else not self.low <= 0 <= self.high

    def percent(self) -> str:
        """For tables: `+0.52% (0.31 to 0.73)`."""
        if math.isnan(self.low):
            return f"{self.mean:+.2%} (one seed, noise unknown)"
        return f"{self.mean:+.2%} ({100 * self.low:+.2f} to {100 * self.high:+.2f})"


@dataclass(frozen=True)
class Noise:
    """Standard deviation of a paired gap between seeds, and its degrees of freedom (0: unknown)."""

    deviation: float
    freedom: int

    @staticmethod
    def pooled(groups: Sequence[Sequence[float]]) -> Noise:
        """Of gaps by arm; arms with one seed say nothing."""
        several = [np.asarray(group) for group in groups if len(group) > 1]
        freedom = sum(len(group) - 1 for group in several)
        squares = sum(float(((group - group.mean()) ** 2).sum()) for group in several)
        return Noise(math.sqrt(squares / freedom) if freedom else math.nan, freedom)

    def estimate(self, values: Sequence[float]) -> Estimate:
        """The mean of an arm's gaps with its interval."""
        mean, count = float(np.mean(values)), len(values)
        if not self.freedom:
            return Estimate(mean, math.nan, math.nan, count)
        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom)
        half = float(quantile) * self.deviation / math.sqrt(count)
        return Estimate(mean, mean - half, mean + half, count)

    def power(self, effect: float, num_seeds: int) -> float:
        """The chance that a true gap of `effect` is told from none by so many pairs."""
        freedom = num_seeds - 1
        if freedom < 1:
            return math.nan
        if not self.deviation:
            return float(effect != 0)
        limit = stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
        shift = effect / self.deviation * math.sqrt(num_seeds)
        return float(stats.nct.sf(limit, freedom, shift) + stats.nct.cdf(-limit, freedom, shift))

    def seeds_needed(self, effect: float, most: int = 1000) -> int | None:
        """The fewest seeds that see `effect` with a chance of `POWER`; None: more than `most`."""
        return next((n for n in range(2, most) if self.power(effect, n) >= POWER), None)


def final_loss(curve: Curve, window: float) -> float:
    """Mean training loss over the last `window` of the run's tokens."""
    return float(curve.values[curve.tokens > curve.tokens[-1] * (1 - window)].mean())


def paired(tables: Tables, arm: str, baseline: str, size: str, window: float) -> dict[int, float]:
    """Relative gap of an arm's final training loss to the baseline's, by seed that both have.

    Only steps that both have count: a run that was forked within the window has fewer.
    """
    ours, theirs = (_loss_curves(tables, name, size) for name in (arm, baseline))
    gaps = {}
    for seed in ours.keys() & theirs.keys():
        a, b = _shared(ours[seed], theirs[seed])
        gaps[seed] = final_loss(a, window) / final_loss(b, window) - 1
    return dict(sorted(gaps.items()))


def _loss_curves(tables: Tables, arm: str, size: str) -> dict[int, Curve]:
    rows = [row for row in tables.rows if (row.arm, row.size) == (arm, size)]
    return {row.seed: tables.curves[row.run][TRAIN] for row in rows}


def _shared(a: Curve, b: Curve) -> tuple[Curve, Curve]:
    """Two curves where both have a value."""
    tokens, at_a, at_b = np.intersect1d(a.tokens, b.tokens, return_indices=True)
    return Curve(tokens, a.values[at_a]), Curve(tokens, b.values[at_b])


def gap_curve(tables: Tables, ours: Row, theirs: Row, name: str = TRAIN) -> Curve:
    """Relative gap by tokens, where both runs have a value."""
    a, b = _shared(tables.curves[ours.run][name], tables.curves[theirs.run][name])
    return Curve(a.tokens, a.values / b.values - 1)


@dataclass(frozen=True)
class Trend:
    """A least-squares line of the gap over log10 of the size, with the slope's interval."""

    slope: float
    low: float
    high: float


def trend(sizes: Sequence[float], gaps: Sequence[float]) -> Trend | None:
    """None with fewer than three different sizes: a line through two says nothing of noise."""
    if len(set(sizes)) < 3:
        return None
    fit = stats.linregress(np.log10(sizes), gaps)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(gaps) - 2)) * float(fit.stderr)
    return Trend(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half)


def tokens_to_match(level: float, losses: Mapping[float, float]) -> float | None:
    """Tokens at which whole runs of an arm reach a loss, interpolated in log(tokens).

    losses: final loss by tokens, each of a run with a decay of its own (a curve before its decay
    would overstate the need). None where no run reaches the level.
    """
    tokens = sorted(losses)
    for first, second in itertools.pairwise(tokens):
        before, after = losses[first], losses[second]
        if before >= level >= after and before > after:
            share = (before - level) / (before - after)
            return float(math.exp(math.log(first) + share * math.log(second / first)))
    return None
