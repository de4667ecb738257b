"""A run's metrics as curves: one array of tokens and one of values for each name."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.train.metrics import final_records


@dataclass(frozen=True)
class Curve:
    """Values by tokens trained, in order; both [number of records] float64."""

    tokens: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        return float(self.values[-1])

    def smooth(self, share: float = 0.02) -> Curve:
        """The running median over a `share` of the curve: outliers do not bend it.

        Values that are not finite are left out.
        """
        finite = np.isfinite(self.values)
        tokens, values = self.tokens[finite], self.values[finite]
        half = max(1, round(len(values) * share / 2))
        medians = [np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
        return Curve(tokens, np.array(medians))


@dataclass(frozen=True)
class Branch:
    """One run of a family: its loss, and where it left its parent (None for the first run)."""

    run_id: str
    loss: Curve | None  # None where it has not trained yet
    parent: str | None = None
    fork_step: int = 0
    fork_tokens: int = 0
    difference: tuple[str, ...] = ()


def read_curves(path: Path) -> dict[str, Curve]:
    """All curves of a metrics file by name. Replayed steps count once, a torn line not at all."""
    tokens, values = defaultdict(list), defaultdict(list)
    for record in final_records(path):
        for name, value in record["metrics"].items():
            if value is not None:
                tokens[name].append(record["tokens"])
                values[name].append(value)
    return {
        name: Curve(np.array(tokens[name], float), np.array(values[name], float)) for name in values
    }
