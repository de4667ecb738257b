"""In which order documents follow each other in a source's stream, and how rows are filled.

`concatenate` keeps the order of hashes; rows are cut wherever they fall. `best_fit` (Ding et al.
2024, "Fewer Truncations Improve Language Modeling") puts documents into rows so that none that fits
into a row is cut: within a window of documents, the longest first, each goes to the row with the
least room that suffices. A longer document starts a row and goes on in the rows that follow it. The
rest of a row is filled with end-of-document tokens, whose labels are ignored like any behind one;
in a shard's offsets they belong to the document before them.

Legend: D documents.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PACKINGS = ("concatenate", "best_fit")
WINDOW = 65_536  # documents packed together, in the order of their hashes

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The stream of a source: documents in order, each with padding tokens behind it."""

    order_D: Integers  # rows of the counts given
    padding_D: Integers  # in that order


def lay_out(counts_D: Integers, packing: str, row_length: int) -> Layout:
    """The stream of documents of `counts_D` tokens each, end-of-document tokens included."""
    if packing == "concatenate":
        return Layout(np.arange(len(counts_D)), np.zeros(len(counts_D), np.int64))
    order, padding = [], []
    for first in range(0, len(counts_D), WINDOW):
        for row, room in _best_fit(counts_D[first : first + WINDOW], row_length):
            order += [first + document for document in row]
            padding += [0] * (len(row) - 1) + [room]
    padding[-1] += 1  # the token after the last row: its last label is ignored as well
    return Layout(np.array(order, np.int64), np.array(padding, np.int64))


def _best_fit(counts_D: Integers, row_length: int) -> list[tuple[list[int], int]]:
    """Rows as (documents, room left); one with a long document stands for all its rows."""
    rows: list[tuple[list[int], int]] = []
    by_room: dict[int, list[int]] = {}  # rows with that much room
    rooms: list[int] = []  # those that exist, sorted
    for document in np.argsort(-counts_D, kind="stable").tolist():
        count = int(counts_D[document])
        at = bisect.bisect_left(rooms, count)
        if count > row_length or at == len(rooms):
            number, room = len(rows), -count % row_length
            rows.append(([document], room))
        else:
            number = by_room[rooms[at]].pop()
            members, room = rows[number]
            if not by_room[room]:
                del by_room[room], rooms[at]
            room -= count
            members.append(document)
            rows[number] = members, room
        if room:
            if room not in by_room:
                bisect.insort(rooms, room)
            by_room.setdefault(room, []).append(number)
    return rows
