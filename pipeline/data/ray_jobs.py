"""The passes over the corpus that Ray Data runs: reading, fetching texts, tokenizing, writing.

A pass is a list of tasks that know nothing of each other. Each leaves its result in a file that
appears when it is whole; a task whose file exists is done. So nothing depends on blocks, workers or
the order in which tasks end, and an interrupted pass goes on where it stood. The text goes from
disk to disk: no process holds more than a few batches of it.

    <index>/<key>.arrow    of each item of a task: id, status, bytes, SHA-256; kept for good
    text/<key>.arrow       the documents' texts
    parts/<key>-<hash>.tokens    the tokens of the documents wanted (.npy), .located where each is
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from numpy.typing import NDArray

from pipeline.config import ConfigError
from pipeline.data.document import DOCUMENT, Item
from pipeline.data.files import is_full, whole_file
from pipeline.data.shards import token_dtype
from pipeline.data.sources import ReadTask, read_task
from pipeline.data.tokenizer import TOKENIZER_FILE, encode_documents, load_tokenizer

_INDEX = pa.schema(
    [
        ("id", pa.int64()),  # counted from the task's first
        ("status", pa.string()),
        ("reserved", pa.bool_()),
        ("bytes", pa.int64()),
        ("sha256", pa.binary(32)),
    ]
)
_TEXT = pa.schema([("id", pa.int64()), ("text", pa.large_string())])
_FULL = "full"  # a failure that is no sentence
SPARE_CPUS = 2  # of those declared, see `pipeline.ray_session`
_BATCH_BYTES = 1 << 20  # of text read, written or tokenized at once: its tokens take 40 times that
_ITEM_BYTES = 100  # that an item without text counts for

_NO_TOKENS = np.empty(0, np.uint16)

Ids = NDArray[np.int64]


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


def run_tasks(function: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Call the function for each number, on any worker of Ray, and wait.

    Raises the `ConfigError` of a task, or `OSError` for a full disk, as the task gave it: Ray would
    wrap an error and try again.
    """

    def attempt(batch: dict[str, NDArray[np.int64]]) -> dict[str, list[str]]:
        failures = []
        for number in batch["item"].tolist():
            try:
                function(number)
                failures.append("")
            except ConfigError as error:
                failures.append(str(error))
            except OSError as error:
                if not is_full(error):
                    raise
                failures.append(_FULL)
        return {"failure": failures}

    if not numbers:
        return
    waiting = ray.data.from_items(list(numbers), override_num_blocks=len(numbers))
    for row in waiting.map_batches(attempt, concurrency=_at_a_time(len(numbers))).iter_rows():
        if row["failure"] == _FULL:
            raise OSError(28, os.strerror(28))
        if row["failure"]:
            raise ConfigError(row["failure"])


def _at_a_time(num_tasks: int) -> int:
    """How many tasks to run at once: a local Ray declares more CPUs than there are cores."""
    return min(num_tasks, max(1, int(ray.cluster_resources()["CPU"]) - SPARE_CPUS))


@dataclass(frozen=True)
class Corpus:
    """All items of the sources, in files. `work` belongs to one preparation."""

    tasks: Sequence[ReadTask]
    evaluations: tuple[tuple[str, bytes], ...]
    index: Path
    work: Path

    def read(self, numbers: Sequence[int] | None = None) -> int:
        """Read the tasks that no index is known of, or those given; returns how many it took."""
        tasks, evaluations, index, text = self.tasks, self.evaluations, self.index, self._text

        def read(number: int) -> None:
            task = tasks[number]
            _read(task, evaluations, index / f"{task.key}.arrow", text / f"{task.key}.arrow")

        if numbers is None:
            known = (index / f"{task.key}.arrow" for task in tasks)
            numbers = [number for number, path in enumerate(known) if not path.is_file()]
        run_tasks(read, numbers)
        return len(numbers)

    def items(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The index of all items in pieces, by `_INDEX`, with ids unique over all sources.

        Each with its source's number.
        """
        for task in self.tasks:
            for batch in _batches(self.index / f"{task.key}.arrow"):
                ids = pa.array(batch["id"].to_numpy() + task.first_id)
                yield task.source, batch.set_column(0, "id", ids)

    def texts(self, ids: Ids) -> Iterator[tuple[int, str]]:
        """Some documents, each with its id, in the order of ids."""
        tasks, text, parts = self.tasks, self._text, self._parts
        wanted = self._wanted(ids)

        def fetch(number: int) -> None:
            stem = wanted[number]
            with _new_table(parts / f"{stem}.arrow", _TEXT) as out:
                for batch in _chosen(text / f"{tasks[number].key}.arrow", parts / f"{stem}.npy"):
                    out.write(batch)

        waiting = [n for n, stem in wanted.items() if not (parts / f"{stem}.arrow").is_file()]
        self._ensure_text(waiting)
        run_tasks(fetch, waiting)
        return (
            (tasks[number].first_id + id_, text)
            for number, stem in wanted.items()
            for batch in _batches(parts / f"{stem}.arrow")
            for id_, text in zip(*(batch[name].to_pylist() for name in ("id", "text")), strict=True)
        )

    def tokenize(
        self, ids: Ids, vocab_size: int, eos_id: int, bos_id: int | None
    ) -> tuple[list[str], pa.Table]:
        """Write the tokens of documents to part files, by the tokenizer in the work folder.

        Returns the parts' names, and where each document is: id, part, start and count.
        """
        tasks, text, parts, work = self.tasks, self._text, self._parts, self.work
        wanted = self._wanted(ids)
        dtype = token_dtype(vocab_size)

        def tokenize(number: int) -> None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray runs several of these at once
            tokenizer, stem = _loaded(work / TOKENIZER_FILE), wanted[number]
            located: list[Ids] = [np.empty((2, 0), np.int64)]  # of a file that nothing is wanted of
            with whole_file(parts / f"{stem}.tokens") as out:
                chosen = _chosen(text / f"{tasks[number].key}.arrow", parts / f"{stem}.npy")
                for batch in chosen:
                    documents = encode_documents(
                        tokenizer, batch["text"].to_pylist(), eos_id, bos_id, dtype
                    )
                    out.write(np.concatenate([_NO_TOKENS.astype(dtype), *documents]).data)
                    counts = np.array([len(document) for document in documents], np.int64)
                    chosen_ids = batch["id"].to_numpy().astype(np.int64)  # of no chunk: float64
                    located.append(np.stack([chosen_ids, counts]))
            with whole_file(parts / f"{stem}.located") as out:
                np.save(out, np.concatenate(located, axis=1))

        waiting = [n for n, stem in wanted.items() if not (parts / f"{stem}.located").is_file()]
        self._ensure_text(waiting)
        # The largest first, so that none is left at the end for one worker alone.
        waiting.sort(key=lambda n: -(text / f"{tasks[n].key}.arrow").stat().st_size)
        run_tasks(tokenize, waiting)
        tables = []
        for part, (number, stem) in enumerate(wanted.items()):
            id_D, count_D = np.load(parts / f"{stem}.located")
            columns = [
                id_D + tasks[number].first_id,
                np.full(len(id_D), part),
                np.cumsum(count_D) - count_D,
                count_D,
            ]
            tables.append(pa.table(columns, names=["id", "part", "start", "count"]))
        return list(wanted.values()), pa.concat_tables(tables)

    @property
    def _text(self) -> Path:
        return self.work / "text"

    @property
    def _parts(self) -> Path:
        return self.work / "parts"

    def _wanted(self, ids: Ids) -> dict[int, str]:
        """Leave each task the ids that it is to look for; the stems of these files by task."""
        ids, wanted = np.sort(ids), {}
        firsts = np.array([task.first_id for task in self.tasks])
        assert (np.diff(firsts) > 0).all()
        borders = [*np.searchsorted(ids, firsts).tolist(), len(ids)]
        for number, (start, end) in enumerate(itertools.pairwise(borders)):
            if start < end:
                mine = ids[start:end] - firsts[number]
                stem = f"{self.tasks[number].key}-{hashlib.sha256(mine.tobytes()).hexdigest()[:16]}"
                with whole_file(self._parts / f"{stem}.npy") as file:
                    np.save(file, mine)
                wanted[number] = stem
        return wanted

    def _ensure_text(self, numbers: Sequence[int]) -> None:
        """Read again what an earlier preparation knows only the index of."""
        paths = {number: self._text / f"{self.tasks[number].key}.arrow" for number in numbers}
        self.read([number for number, path in paths.items() if not path.is_file()])


def _read(
    task: ReadTask, evaluations: tuple[tuple[str, bytes], ...], index: Path, text: Path
) -> None:
    """The task's texts and its index, which appears last: who finds it may count on both."""
    with _new_table(index, _INDEX) as indexed, _new_table(text, _TEXT) as written:
        for items in _in_batches(read_task(task, evaluations)):
            rows = []
            for id_, item in items:
                raw = item.text.encode()
                digest = hashlib.sha256(raw).digest()
                rows.append((id_ - task.first_id, item.status, item.reserved, len(raw), digest))
            documents = [(id_ - task.first_id, i.text) for id_, i in items if i.status == DOCUMENT]
            indexed.write(_record_batch(rows, _INDEX))
            written.write(_record_batch(documents, _TEXT))


def _in_batches(items: Iterator[tuple[int, Item]]) -> Iterator[list[tuple[int, Item]]]:
    batch, size = [], 0
    for numbered in items:
        batch.append(numbered)
        size += len(numbered[1].text) + _ITEM_BYTES
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _record_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in schema]
    return pa.record_batch(columns, schema=schema)


@contextmanager
def _new_table(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatchFileWriter]:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with whole_file(path) as file, pa.ipc.new_file(file, schema, options=options) as out:
        yield out


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a table, one in memory at a time: a mapped file would add its pages."""
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _chosen(text: Path, wanted: Path) -> Iterator[pa.RecordBatch]:
    """The documents of a task that are asked for, in batches."""
    sorted_ids = np.load(wanted)
    for batch in _batches(text):
        found = np.isin(batch["id"].to_numpy(), sorted_ids, assume_unique=True)
        yield batch.filter(pa.array(found))


@lru_cache(1)
def _loaded(path: Path) -> Any:
    """The tokenizer, once for each worker."""
    return load_tokenizer(path)
