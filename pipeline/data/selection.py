"""Which documents are trained on, held out or left out: a function of their hashes alone.

Nothing here sees an order of reading, so the result does not depend on workers or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DataConfig

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """What is known of N documents without their text."""

    id_N: NDArray[np.int64]  # unique
    source_N: NDArray[np.int64]  # position among the configuration's sources
    hash_N4: NDArray[np.uint64]  # SHA-256 of the text as four big-endian words
    bytes_N: NDArray[np.int64]
    reserved_N: NDArray[np.bool_]


@dataclass(frozen=True)
class Selection:
    """Rows of `Documents` for each source, in the order of their hashes, and what was left out."""

    training: list[Rows]
    holdout: list[Rows]
    reserved: list[Rows]
    counts: list[dict[str, int]]


def select(documents: Documents, data: DataConfig) -> Selection:
    """Drop duplicates over all sources, hold out by hash, and cap each part in whole documents.

    A document whose hash falls below `holdout_fraction` of all hashes is never trained on, even
    if the held-out part has reached its cap without it; nor is a reserved one.
    """
    order = np.lexsort((documents.id_N, *reversed(documents.hash_N4.T)))
    hashes = documents.hash_N4[order]
    is_copy = np.zeros(len(order), dtype=bool)
    is_copy[1:] = (hashes[1:] == hashes[:-1]).all(axis=1)
    # Of copies the one with the lowest id stays: the first source's, its first file's.
    unique = order[~is_copy]
    copies_by_source = np.bincount(documents.source_N[order[is_copy]], minlength=len(data.sources))
    limit = int(data.holdout_fraction * 2.0**64)
    below = documents.hash_N4[unique, 0] < np.uint64(limit)
    reserved = documents.reserved_N[unique]

    selection = Selection([], [], [], [])
    for number, source in enumerate(data.sources.values()):
        mine = documents.source_N[unique] == number
        trainable = unique[mine & ~below & ~reserved]
        held_out = unique[mine & below & ~reserved]
        kept_apart = unique[mine & reserved]
        training = _capped(documents, trainable, source.max_bytes)
        holdout = _capped(documents, held_out, data.holdout_max_bytes)
        reserved_rows = _capped(documents, kept_apart, data.holdout_max_bytes)
        selection.training.append(training)
        selection.holdout.append(holdout)
        selection.reserved.append(reserved_rows)
        selection.counts.append(
            {
                "duplicate": int(copies_by_source[number]),
                "held_out": len(holdout),
                "reserved": len(reserved_rows),
                "holdout_over_cap": len(held_out) - len(holdout),
                "reserved_over_cap": len(kept_apart) - len(reserved_rows),
                "over_max_bytes": len(trainable) - len(training),
            }
        )
    return selection


def tokenizer_sample(
    documents: Documents, training: Sequence[Rows], total_bytes: int
) -> list[Rows]:
    """Training documents to train the tokenizer on: equal bytes from each source, in hash order.

    A source with less than its part gives all it has, and the others share the rest.
    """
    available = [int(documents.bytes_N[rows].sum()) for rows in training]
    sample: list[Rows] = [np.empty(0, dtype=np.int64)] * len(training)
    left = total_bytes
    by_size = sorted(range(len(training)), key=lambda number: available[number])
    for position, number in enumerate(by_size):
        rows = training[number]
        share = left // (len(by_size) - position)
        sample[number] = _capped(documents, rows, share) if len(rows) else rows
        left -= int(documents.bytes_N[sample[number]].sum())
    return sample


def _capped(documents: Documents, rows: Rows, max_bytes: int | None) -> Rows:
    """The first rows of together `max_bytes` at most, or the first one alone."""
    if max_bytes is None or not len(rows):
        return rows
    fits = np.searchsorted(np.cumsum(documents.bytes_N[rows]), max_bytes, side="right")
    return rows[: max(1, int(fits))]
