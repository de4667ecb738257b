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

Request = tuple[int, int, int]  # first unit, number of units, sequence length


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


def read_chunk(
    dataset: Dataset, mixture: Mixture, unit_length: int, requests: Sequence[Request]
) -> Chunk:
    """Read the units that the plan has at the requests' places."""
    indices = [np.arange(first, first + count) for first, count, _ in requests]
    source_U, row_U = mixture.locate(np.concatenate(indices))
    tokens_UT, damaged = dataset.read_units(mixture.names, source_U, row_U, unit_length)
    return Chunk(tuple(requests), tokens_UT, source_U, damaged)


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
