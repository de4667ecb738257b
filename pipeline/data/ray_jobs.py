"""The two passes over the text that Ray Data runs: reading, and tokenizing.

Each pass returns rows in whatever order they come; nothing after it looks at that order.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from numpy.typing import NDArray

from pipeline.config import ConfigError
from pipeline.data.document import Item
from pipeline.data.shards import token_dtype
from pipeline.data.sources import ReadTask, read_task
from pipeline.data.tokenizer import encode_documents, load_tokenizer

_ITEMS = pa.schema(
    [
        ("id", pa.int64()),
        ("status", pa.string()),
        ("reserved", pa.bool_()),
        ("bytes", pa.int64()),
        ("sha256", pa.binary(32)),
        ("text", pa.large_string()),
    ]
)
_FAILED = "failed: "  # before the message in a status
SPARE_CPUS = 2  # of those declared, see `pipeline.ray_session`
_BLOCK_BYTES = 8 << 20  # of text handed on at once
_BATCH_DOCUMENTS = 512  # tokenized at once


@contextmanager
def quiet_ray_data(preserve_order: bool = False, memory: float | None = None) -> Iterator[None]:
    """Datasets made inside show no progress bars or start messages, and may keep their order.

    memory: bytes of blocks that may wait in the object store; None: Ray's own limit.
    """
    context = ray.data.DataContext.get_current()
    options, logger = context.execution_options, logging.getLogger("ray.data")
    before = context.enable_progress_bars, options.preserve_order, logger.level
    limits = options.resource_limits
    context.enable_progress_bars, options.preserve_order = False, preserve_order
    if memory is not None:
        options.resource_limits = limits.copy(object_store_memory=memory)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars, options.preserve_order = before[:2]
        options.resource_limits = limits
        logger.setLevel(before[2])


class Corpus:
    """All items of the sources, held by Ray (in shared memory, spilled to disk when full).

    Raises `ConfigError` for a file that cannot be read.
    """

    def __init__(self, tasks: Sequence[ReadTask]) -> None:
        def read(batch: dict[str, NDArray[np.int64]]) -> Iterator[pa.Table]:
            for number in batch["item"]:
                yield from _item_tables(tasks[number])

        numbers = ray.data.from_items(list(range(len(tasks))), override_num_blocks=len(tasks))
        # Ray keeps the text; only what decides comes to the driver.
        self._items = numbers.map_batches(read, concurrency=_at_a_time(numbers)).materialize()
        self.index = self._collect(lambda table: table.select(_ITEMS.names[:-1]))
        for failure in self.index.filter(pc.starts_with(self.index["status"], _FAILED))["status"]:
            raise ConfigError(failure.as_py().removeprefix(_FAILED))

    def texts(self, ids: NDArray[np.int64]) -> dict[int, str]:
        """The texts of some documents, by id."""
        wanted = np.sort(ids)
        table = self._collect(lambda table: _rows_among(table, wanted))
        return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))

    def tokenize(
        self, ids: NDArray[np.int64], tokenizer: Path, eos_id: int, vocab_size: int, folder: Path
    ) -> pa.Table:
        """Write the ids' tokens, EOS included, to part files in `folder`.

        Returns where they are: id, part (file name), start and count (tokens in the part).
        """
        wanted = np.sort(ids)

        def encode(table: pa.Table) -> pa.Table:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray runs several of these at once
            table = _rows_among(table, wanted)
            loaded = load_tokenizer(tokenizer)
            documents = (
                document
                for batch in table.to_batches(_BATCH_DOCUMENTS)
                for document in encode_documents(loaded, batch["text"].to_pylist(), eos_id)
            )
            return _write_part(table["id"], documents, token_dtype(vocab_size), folder)

        return self._collect(encode)

    def _collect(self, function: Callable[[pa.Table], pa.Table]) -> pa.Table:
        """What the function makes of each block of items, in any order."""
        mapped = self._items.map_batches(
            function,
            batch_size=None,
            batch_format="pyarrow",
            concurrency=_at_a_time(self._items),
        )
        return pa.concat_tables(ray.get(mapped.to_arrow_refs())).combine_chunks()


def _at_a_time(dataset: ray.data.Dataset) -> int:
    """How many blocks to work on at once: a local Ray declares more CPUs than there are cores."""
    return min(dataset.num_blocks(), max(1, int(ray.cluster_resources()["CPU"]) - SPARE_CPUS))


def _item_tables(task: ReadTask) -> Iterator[pa.Table]:
    """The items of a task as tables of `_ITEMS`, in bites that fit into memory."""
    rows: list[dict[str, Any]] = []
    size = 0
    for id_, item in _items_or_failure(task):
        raw = item.text.encode()
        rows.append(
            {
                "id": id_,
                "status": item.status,
                "reserved": item.reserved,
                "bytes": len(raw),
                "sha256": hashlib.sha256(raw).digest(),
                "text": item.text,
            }
        )
        size += len(raw) + 100
        if size >= _BLOCK_BYTES:
            yield pa.Table.from_pylist(rows, schema=_ITEMS)
            rows, size = [], 0
    yield pa.Table.from_pylist(rows, schema=_ITEMS)


def _items_or_failure(task: ReadTask) -> Iterator[tuple[int, Item]]:
    """The task's items, and an unreadable file as the last: Ray would wrap and repeat an error."""
    try:
        yield from read_task(task)
    except ConfigError as error:
        yield -1, Item(_FAILED + str(error))


def _rows_among(table: pa.Table, sorted_ids: NDArray[np.int64]) -> pa.Table:
    ids = table["id"].to_numpy()
    places = np.searchsorted(sorted_ids, ids)
    found = np.zeros(len(ids), dtype=bool)
    inside = places < len(sorted_ids)
    found[inside] = sorted_ids[places[inside]] == ids[inside]
    return table.filter(pa.array(found)).select(["id", "text"])


def _write_part(
    ids: pa.ChunkedArray, documents: Iterable[NDArray[Any]], dtype: np.dtype[Any], folder: Path
) -> pa.Table:
    """One part file with these documents, and where each is in it."""
    name = f"{uuid.uuid4().hex}.tokens"  # a task that Ray runs again writes another file
    counts = []
    with (folder / name).open("wb") as file:
        for document in documents:
            file.write(document.astype(dtype).tobytes())
            counts.append(len(document))
    count = np.array(counts, dtype=np.int64)
    part = pa.array([name] * len(count), pa.string())
    return pa.table({"id": ids, "part": part, "start": np.cumsum(count) - count, "count": count})
