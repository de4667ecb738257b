"""Ray Data as the reader of a planned mixture: for shards on storage too slow to map into memory.

The plan is a pure function, so a task needs only the numbers of the requests that it reads. Ray
Data keeps them in order, holds back when the reader is slow, and places tasks on any node that sees
the shards; the batches equal those of `MixtureStream.read` byte for byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import ray.data

from pipeline.data.ray_jobs import quiet_ray_data
from pipeline.data.shards import Dataset

if TYPE_CHECKING:
    from pipeline.data.stream import Batch, MixtureStream, Request

WINDOW = 4096  # requests planned at a time
_TASK_UNITS = 512  # units that a task reads, about: fewer cost more in overhead than in reading
_READERS = 2  # tasks at a time for each rank
_READER_CPUS = 0.25  # reading waits for storage; the training workers hold whole CPUs


def iterate_with_ray(stream: MixtureStream, requests: Iterable[Request]) -> Iterator[Batch]:
    """The batches of the requests in order. Ray must be running."""
    following = iter(requests)
    while window := list(itertools.islice(following, WINDOW)):
        yield from _read_window(stream, window)


def _read_window(stream: MixtureStream, window: list[Request]) -> Iterator[Batch]:
    from pipeline.data.stream import make_batch  # imports torch, which reading does not need

    folder, mixture, unit_length = stream.dataset.folder, stream.mixture, stream.unit_length

    def fetch(batch: dict[str, np.ndarray]) -> pa.Table:
        dataset = _opened(folder)
        tokens = []
        for number in batch["item"]:
            first_unit, num_units, _ = window[number]
            source_U, row_U = mixture.locate(np.arange(first_unit, first_unit + num_units))
            names = [mixture.names[source] for source in source_U]
            tokens.append(dataset.read_units(names, row_U, unit_length).tobytes())
        return pa.table({"number": batch["item"], "tokens": pa.array(tokens, pa.large_binary())})

    units = sum(num_units for _, num_units, _ in window)
    blocks = min(len(window), -(-units // _TASK_UNITS))
    with quiet_ray_data(preserve_order=True):
        numbers = ray.data.from_items(list(range(len(window))), override_num_blocks=blocks)
        fetched = numbers.map_batches(
            fetch, batch_size=None, num_cpus=_READER_CPUS, concurrency=min(blocks, _READERS)
        )
        for number, row in enumerate(fetched.iter_rows()):
            assert row["number"] == number, "Ray Data changed the order"
            first_unit, num_units, sequence_length = window[number]
            tokens = np.frombuffer(row["tokens"], dtype=stream.dataset.dtype)
            source_U, _ = mixture.locate(np.arange(first_unit, first_unit + num_units))
            yield make_batch(
                tokens.reshape(num_units, unit_length + 1),
                source_U,
                stream.dataset.eos_id,
                sequence_length,
                first_unit,
                num_units,
            )
        assert number == len(window) - 1, "Ray Data lost rows"


@lru_cache(maxsize=1)
def _opened(folder: Path) -> Dataset:
    """A worker's view of the corpus, opened once."""
    return Dataset.open(folder)
