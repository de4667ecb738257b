"""Ray Data as the reader of a planned mixture: many tasks, on any node that sees the shards.

The plan is a pure function, so a task needs only the requests that it reads. Ray Data keeps them in
order, holds back when the reader is slow, and runs a task again whose worker died; the batches
equal those of `MixtureStream.read` byte for byte.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray.data

from pipeline.data.chunks import Chunk, Request, cut_requests, plan_chunk, read_chunk
from pipeline.data.ray_jobs import quiet_ray_data
from pipeline.data.shards import Dataset

if TYPE_CHECKING:
    from pipeline.data.stream import Batch, MixtureStream

WINDOW = 256  # chunks planned at a time
CHUNK_UNITS = 2048  # fewer cost more in overhead than in reading
_READERS = 2  # tasks at a time for each rank
_READER_CPUS = 0.25  # reading waits for storage; the training workers hold whole CPUs


def iterate_with_ray(
    stream: MixtureStream, requests: Iterable[Request], prefetch_bytes: int, pin: bool
) -> Iterator[Batch]:
    """The batches of the requests in order. Ray must be running."""
    most = min(CHUNK_UNITS, prefetch_bytes // 4 // stream.unit_bytes)
    chunks = cut_requests(requests, most)
    while window := list(itertools.islice(chunks, WINDOW)):
        for chunk in _read_window(stream, window, prefetch_bytes):
            yield from stream.batches(chunk, pin=pin)


def _read_window(
    stream: MixtureStream, window: list[tuple[Request, ...]], prefetch_bytes: int
) -> Iterator[Chunk]:
    """The chunks of a window, each a task of its own and a row of what Ray Data hands over."""
    dataset, mixture, unit_length = stream.dataset, stream.mixture, stream.unit_length
    place = (dataset.folder, dataset.shards_uri)

    def fetch(plan: pa.Table) -> pa.Table:
        opened = _opened(*place)
        return pa.concat_tables(
            _packed(read_chunk(opened, mixture, unit_length, plan_chunk(mixture, requests)))
            for requests in plan["requests"].to_pylist()
        )

    plan = [pa.table({"requests": pa.array([chunk], _REQUESTS)}) for chunk in window]
    with quiet_ray_data(preserve_order=True, memory=prefetch_bytes):
        fetched = ray.data.from_arrow(plan).map_batches(
            fetch,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=_READER_CPUS,
            concurrency=min(len(window), _READERS),
        )
        expected = iter(window)
        for table in fetched.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in range(len(table)):
                chunk = _unpacked(table, row, dataset.dtype)
                assert chunk.requests == next(expected), "Ray Data changed the order"
                yield chunk
        assert next(expected, None) is None, "Ray Data lost rows"


_REQUESTS = pa.list_(pa.list_(pa.int64()))


def _packed(chunk: Chunk) -> pa.Table:
    """A chunk as one row, its arrays not copied."""
    return pa.table(
        {
            "requests": pa.array([chunk.requests], _REQUESTS),
            "tokens": _one_binary(chunk.tokens_UT),
            "sources": _one_binary(chunk.source_U),
            "damaged": [json.dumps(list(chunk.damaged.items()))],
        }
    )


def _one_binary(array: np.ndarray) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, array.nbytes]))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(array)])


def _unpacked(table: pa.Table, row: int, dtype: np.dtype[Any]) -> Chunk:
    """The chunk of a row, its tokens still in Ray's object store."""
    requests = tuple(tuple(request) for request in table["requests"][row].as_py())
    source_U = np.frombuffer(table["sources"][row].as_buffer(), np.int64)
    tokens = np.frombuffer(table["tokens"][row].as_buffer(), dtype)
    damaged = dict(json.loads(table["damaged"][row].as_py()))
    return Chunk(requests, tokens.reshape(len(source_U), -1), source_U, damaged)


@lru_cache(maxsize=1)
def _opened(folder: Path, shards_uri: str | None) -> Dataset:
    """A worker's view of the corpus, opened once."""
    return Dataset.open(folder, shards_uri, check_shards=False)
