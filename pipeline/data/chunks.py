"""Units of a planned mixture as they are stored, read some hundred at a time.

What reading costs beside its bytes (the plan, finding shards, a task of Ray Data) is paid once a
chunk, not once a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset

_FIRST_UNITS = 64
_PLANNED_UNITS = 65_536

Request = tuple[int, int, int]  # first unit, number of units, sequence length


@dataclass(frozen=True)
class PlannedChunk:
    """Consecutive requests, and where their units lie: sources of the mixture, rows of each."""

    requests: tuple[Request, ...]
    source_U: NDArray[np.int64]
    row_U: NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """The units of consecutive requests.

    tokens_UT: each unit with one more token, its last label. damaged: for each unit that could not
    be read, by its place among the chunk's, the shard.
    """

    requests: tuple[Request, ...]
    tokens_UT: NDArray[np.unsignedinteger]
    source_U: NDArray[np.int64]
    damaged: dict[int, str]


def plan_chunk(mixture: Mixture, requests: Sequence[Request]) -> PlannedChunk:
    """Look up the units that the plan has at the requests' places."""
    indices = [np.arange(first, first + count) for first, count, _ in requests]
    return PlannedChunk(tuple(requests), *mixture.locate(np.concatenate(indices)))


def plan_chunks(
    mixture: Mixture, requests: Iterable[Request], most_units: int
) -> Iterator[PlannedChunk]:
    """Chunks of at most so many units, looked up many at a time. A larger request stands alone."""
    for together in cut_requests(requests, max(most_units, _PLANNED_UNITS)):
        planned, start = plan_chunk(mixture, together), 0
        for part in cut_requests(together, most_units):
            units = slice(start, start + sum(count for _, count, _ in part))
            yield PlannedChunk(part, planned.source_U[units], planned.row_U[units])
            start = units.stop


def read_chunk(
    dataset: Dataset,
    mixture: Mixture,
    unit_length: int,
    planned: PlannedChunk,
    out: NDArray[np.unsignedinteger] | None = None,
) -> Chunk:
    """Read a chunk's units, into `out` where that is given: memory that is used again."""
    tokens_UT, damaged = dataset.read_units(
        mixture.names, planned.source_U, planned.row_U, unit_length, out
    )
    return Chunk(planned.requests, tokens_UT, planned.source_U, damaged)


def cut_requests(requests: Iterable[Request], most_units: int) -> Iterator[tuple[Request, ...]]:
    """Consecutive requests together: few units at first, so that training starts soon, then twice
    as many each time up to the limit. A larger request stands alone."""
    chunk: list[Request] = []
    units, limit = 0, min(_FIRST_UNITS, most_units)
    for request in requests:
        if chunk and units + request[1] > limit:
            yield tuple(chunk)
            chunk, units, limit = [], 0, min(2 * limit, most_units)
        chunk.append(request)
        units += request[1]
    if chunk:
        yield tuple(chunk)
