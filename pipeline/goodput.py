"""How much of a run's time went into steps that count, from its metrics file alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goodput:
    """Of all sittings of a run together.

    useful: share of the wall time from the first start to the last record that the steps which
        count would take at the median step's speed. The rest are restarts, steps done again,
        checkpoints, validation and standstill.
    replayed: steps done again after a restart.
    """

    useful: float
    restarts: int
    replayed: int


def goodput(records: Sequence[dict[str, Any]], tokens_per_step: int) -> Goodput | None:
    """None before the second logged step."""
    trained = [record for record in records if record["kind"] == "train"]
    starts = [record for record in records if record["kind"] == "start"]
    if len(trained) < 2 or not starts:
        return None
    seconds = [tokens_per_step / r["metrics"]["train/tokens_per_second"] for r in trained]
    last = max(record["step"] for record in trained)
    wall = max(record["time"] for record in records) - starts[0]["time"]
    count = last - starts[0]["step"]
    replayed, reached = 0, 0
    for record in records:
        if record["kind"] == "start":
            replayed += max(0, reached - record["step"])
            reached = record["step"]
        elif record["kind"] == "train":
            reached = record["step"]
    useful = count * statistics.median(seconds) / wall if wall > 0 else 1.0
    return Goodput(min(useful, 1.0), len(starts) - 1, replayed)
