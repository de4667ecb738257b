"""Generated worksheets: problems of one kind with worked answers, in plain English.

A worksheet is a pure function of (seed, index). Every `RESERVED_EVERY`-th one is of a reserved
kind: those are held out as a whole, so that a question made of them tests a kind never trained on.

    Fractions: addition

    Problem 1. What is 3/4 + 5/6?
    The least common denominator of 4 and 6 is 12.
    ...
    Answer: 19/12
"""

from __future__ import annotations

import random

from pipeline.data.document import Item, from_text
from pipeline.data.mathematics_problems import RESERVED_KINDS, TRAINED_KINDS, Kind

VERSION = 1  # raise it when the documents change
RESERVED_EVERY = 32
MEAN_BYTES = 900  # of a worksheet, about; at least this on average
DEFAULT_BYTES = 6_000_000  # of text, when the source has no `max_bytes`


def num_worksheets(max_bytes: int | None, holdout_fraction: float) -> int:
    """Enough worksheets that `max_bytes` are left after the hold-out."""
    kept = (1 - holdout_fraction) * (1 - 1 / RESERVED_EVERY)
    return int((max_bytes or DEFAULT_BYTES) / kept / MEAN_BYTES) + 2 * RESERVED_EVERY


def worksheet(seed: int, index: int) -> Item:
    """The worksheet of that index; `reserved` says that its kind is never trained on."""
    reserved = index % RESERVED_EVERY == RESERVED_EVERY - 1
    kinds = RESERVED_KINDS if reserved else TRAINED_KINDS
    rng = random.Random(f"{seed}/{index}")
    return from_text(_render(rng.choice(kinds), rng), reserved)


def _render(kind: Kind, rng: random.Random) -> str:
    """Four to eight problems with different questions under one title."""
    problems: dict[str, str] = {}
    wanted = rng.randint(4, 8)
    for _ in range(4 * wanted):
        problem = kind.make(rng)
        working = "\n".join([problem.question, *problem.steps, f"Answer: {problem.answer}"])
        problems.setdefault(problem.question, working)
        if len(problems) == wanted:
            break
    parts = [kind.title]
    parts += [f"Problem {i}. {working}" for i, working in enumerate(problems.values(), start=1)]
    return "\n\n".join(parts) + "\n"
