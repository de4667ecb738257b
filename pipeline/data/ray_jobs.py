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
from pipeline.data.document import DOCUMENT
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
_BATCH_BYTES = 4 << 20  # of text written, read or tokenized at once

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

    def items(self) -> pa.Table:
        """The index of all items, by `_INDEX`, with ids unique over all sources."""
        tables = []
        for task in self.tasks:
            with pa.OSFile(str(self.index / f"{task.key}.arrow")) as file:
                table = pa.ipc.open_file(file).read_all()
            ids = pa.array(table["id"].to_numpy() + task.first_id)
            tables.append(table.set_column(0, "id", ids))
        return pa.concat_tables(tables)

    def texts(self, ids: Ids) -> dict[int, str]:
        """The texts of some documents, by id."""
        tasks, text, parts = self.tasks, self._text, self._parts
        wanted = self._wanted(ids)

        def fetch(number: int) -> None:
            stem = wanted[number]
            chosen = _chosen(text / f"{tasks[number].key}.arrow", parts / f"{stem}.npy")
            _write_table(parts / f"{stem}.arrow", _TEXT, chosen)

        waiting = [n for n, stem in wanted.items() if not (parts / f"{stem}.arrow").is_file()]
        self._ensure_text(waiting)
        run_tasks(fetch, waiting)
        found: dict[int, str] = {}
        for number, stem in wanted.items():
            with pa.OSFile(str(parts / f"{stem}.arrow")) as file:
                table = pa.ipc.open_file(file).read_all()
            ids_D = table["id"].to_numpy() + tasks[number].first_id
            found |= dict(zip(ids_D.tolist(), table["text"].to_pylist(), strict=True))
        return found

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
    """The task's texts and its index, in this order: who finds the index may count on both."""
    rows: list[tuple[Any, ...]] = []

    def documents() -> Iterator[pa.Table]:
        ids: list[int] = []
        texts: list[str] = []
        size = 0
        for id_, item in read_task(task, evaluations):
            raw, local = item.text.encode(), id_ - task.first_id
            digest = hashlib.sha256(raw).digest()
            rows.append((local, item.status, item.reserved, len(raw), digest))
            if item.status == DOCUMENT:
                ids.append(local)
                texts.append(item.text)
                size += len(raw)
            if size >= _BATCH_BYTES:
                yield pa.table([ids, texts], schema=_TEXT)
                ids, texts, size = [], [], 0
        if ids:
            yield pa.table([ids, texts], schema=_TEXT)

    _write_table(text, _TEXT, documents())
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in _INDEX]
    _write_table(index, _INDEX, [pa.table(columns, schema=_INDEX)])


def _write_table(
    path: Path, schema: pa.Schema, tables: Iterator[pa.Table] | list[pa.Table]
) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with whole_file(path) as file, pa.ipc.new_file(file, schema, options=options) as out:
        for table in tables:
            out.write_table(table)


def _chosen(text: Path, wanted: Path) -> Iterator[pa.Table]:
    """The documents of a task that are asked for, in batches."""
    sorted_ids = np.load(wanted)
    with pa.memory_map(str(text)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            found = np.isin(batch["id"].to_numpy(), sorted_ids, assume_unique=True)
            yield pa.Table.from_batches([batch.filter(pa.array(found))])


@lru_cache(1)
def _loaded(path: Path) -> Any:
    """The tokenizer, once for each worker."""
    return load_tokenizer(path)
