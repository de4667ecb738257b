"""Batches of a planned mixture: reads the rows that the plan names, ahead of training.

The executors differ in who reads a chunk of requests; what turns it into batches is the same.

Legend: U units, B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import cpu
from model.loss import IGNORED
from model.packing import document_index
from pipeline.data.chunks import (
    Chunk,
    PlannedChunk,
    Request,
    plan_chunk,
    plan_chunks,
    read_chunk,
)
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset

Stored = NDArray[np.unsignedinteger]

PREFETCH_BYTES = 256 << 20
_CHUNKS = 4  # held at a time, one of them in use
_CHUNK_UNITS = 4096


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents with their labels, and which units of the plan they are.

    damaged: shards that units of it lie in and that could not be read; these units' labels are
    ignored.
    """

    tokens_BT: Tensor  # int64
    labels_BT: Tensor  # int64, the next token; IGNORED where that starts another document
    seq_idx_BT: Tensor  # int32, number of the document within its row
    source_B: Tensor  # int64, source ids of the mixture
    first_unit: int
    num_units: int
    damaged: frozenset[str] = frozenset()


def empty_batch(rows: int, sequence_length: int) -> Batch:
    """Rows of one document each without a label: no weight in any loss."""
    tokens_BT = torch.zeros(rows, sequence_length, dtype=torch.int64)
    return Batch(
        tokens_BT,
        torch.full_like(tokens_BT, IGNORED),
        torch.zeros_like(tokens_BT, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        first_unit=0,
        num_units=0,
    )


class MixtureStream:
    """The units of a mixture over a prepared corpus, in the mixture's order.

    `unit_length` is in tokens. `across_documents`: whether a document's last token has the next
    document's first as its label, or none. Holds no position: whoever reads says from where.
    """

    def __init__(
        self,
        dataset: Dataset,
        mixture: Mixture,
        unit_length: int,
        *,
        across_documents: bool = False,
    ) -> None:
        for name, size in zip(mixture.names, mixture.sizes, strict=True):
            assert size <= dataset.num_units(name, unit_length)
        self.dataset = dataset
        self.mixture = mixture
        self.unit_length = unit_length
        self.across_documents = across_documents

    def read(self, first_unit: int, num_units: int, sequence_length: int) -> Batch:
        """Units first_unit .. first_unit + num_units - 1, each cut into consecutive rows.

        Raises `ValueError` if the sequence length does not divide the unit.
        """
        planned = plan_chunk(self.mixture, [(first_unit, num_units, sequence_length)])
        [batch] = self.batches(self.read_chunk(planned))
        return batch

    def read_chunk(self, planned: PlannedChunk, out: Stored | None = None) -> Chunk:
        """The units of a chunk as they are stored."""
        return read_chunk(self.dataset, self.mixture, self.unit_length, planned, out)

    def batches(self, chunk: Chunk, *, pin: bool = False) -> Iterator[Batch]:
        """The batches of a chunk's requests, in order."""
        start = 0
        for first_unit, num_units, sequence_length in chunk.requests:
            if self.unit_length % sequence_length:
                raise ValueError(
                    f"a sequence length of {sequence_length} does not divide a unit of "
                    f"{self.unit_length} tokens, the longest phase's sequence"
                )
            units = slice(start, start + num_units)
            inside = range(start, start + num_units)
            yield make_batch(
                chunk.tokens_UT[units],
                chunk.source_U[units],
                self.dataset.eos_id,
                sequence_length,
                first_unit,
                frozenset(file for unit, file in chunk.damaged.items() if unit in inside),
                across_documents=self.across_documents,
                pin=pin,
            )
            start += num_units

    def without_shards(self, batch: Batch, shards: frozenset[str]) -> Batch:
        """The batch with no label in the units that lie, in part or whole, in one of the shards.

        The order of units stays as planned; blocked ones weigh nothing.
        """
        if not shards:
            return batch
        source_U, row_U = self.mixture.locate(
            np.arange(batch.first_unit, batch.first_unit + batch.num_units)
        )
        blocked = [
            not shards.isdisjoint(
                self.dataset.shards_of_unit(self.mixture.names[source], row, self.unit_length)
            )
            for source, row in zip(source_U.tolist(), row_U.tolist(), strict=True)
        ]
        rows_per_unit = len(batch.labels_BT) // batch.num_units
        blocked_B1 = torch.tensor(blocked).repeat_interleave(rows_per_unit)[:, None]
        labels_BT = batch.labels_BT.masked_fill(blocked_B1, IGNORED)
        return dataclasses.replace(batch, labels_BT=labels_BT)

    def iterate(
        self,
        requests: Iterable[Request],
        *,
        prefetch_bytes: int = PREFETCH_BYTES,
        executor: str = "mmap",
        pin: bool = False,
    ) -> Iterator[Batch]:
        """The batches of the requests in order, read ahead.

        `mmap` reads in a thread of this process, which ends with the iterator; `ray` lets Ray Data
        read. Both give the same batches, and raise an error in reading where its batch would have
        come. At most `prefetch_bytes` of stored units are held, or one chunk if that is more; they
        become batches when they are asked for. pin: in page-locked memory, from where a GPU fetches
        them by itself.
        """
        if executor == "ray":
            from pipeline.data.ray_stream import iterate_with_ray

            return iterate_with_ray(self, requests, prefetch_bytes, pin)
        assert executor == "mmap"
        return self._iterate_with_thread(requests, prefetch_bytes, pin)

    @property
    def unit_bytes(self) -> int:
        """What a unit takes as it is stored."""
        return (self.unit_length + 1) * self.dataset.dtype.itemsize

    def _iterate_with_thread(
        self, requests: Iterable[Request], prefetch_bytes: int, pin: bool
    ) -> Iterator[Batch]:
        """The consumer looks up the plan, the thread copies bytes: each holds the interpreter for
        so short that the other hardly waits. Chunks are read into memory that has been used before:
        memory that is new costs more than reading into it."""
        most = min(_CHUNK_UNITS, prefetch_bytes // _CHUNKS // self.unit_bytes)
        chunks = plan_chunks(self.mixture, requests, most)
        waiting: deque[tuple[Future[Chunk], Stored]] = deque()
        unused: list[Stored | None] = [None] * _CHUNKS
        pool = ThreadPoolExecutor(1, "read-ahead")
        try:
            following = next(chunks, None)
            while following or waiting:
                while following and unused:
                    memory, units = unused.pop(), len(following.source_U)
                    if memory is None or len(memory) < units:
                        shape = (max(most, units), self.unit_length + 1)
                        memory = np.empty(shape, self.dataset.dtype)
                    waiting.append((pool.submit(self.read_chunk, following, memory), memory))
                    following = next(chunks, None)
                future, memory = waiting.popleft()
                yield from self.batches(future.result(), pin=pin)
                unused.append(memory if len(memory) <= most else None)
        finally:
            pool.shutdown(cancel_futures=True)


def make_batch(
    tokens_UT: NDArray[np.unsignedinteger],
    source_U: NDArray[np.int64],
    eos_id: int,
    sequence_length: int,
    first_unit: int = 0,
    damaged: frozenset[str] = frozenset(),
    *,
    across_documents: bool = False,
    pin: bool = False,
) -> Batch:
    """Cut units [U, T + 1] into rows and label them: a document's last token predicts nothing,
    or with `across_documents` what follows."""
    num_units, length = tokens_UT.shape[0], tokens_UT.shape[1] - 1
    shape = (num_units * length // sequence_length, sequence_length)
    tokens_BT = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
    labels_BT = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
    seq_idx_BT = torch.empty(shape, dtype=torch.int32, pin_memory=pin)
    ignored = None if across_documents else IGNORED
    lay_out = cpu.lay_out_rows if cpu.available() else lay_out_rows
    lay_out(
        np.ascontiguousarray(tokens_UT),
        sequence_length,
        eos_id,
        ignored,
        (tokens_BT, labels_BT, seq_idx_BT),
    )
    source_B = torch.from_numpy(source_U.astype(np.int64).repeat(length // sequence_length))
    if pin:
        source_B = source_B.pin_memory()
    return Batch(tokens_BT, labels_BT, seq_idx_BT, source_B, first_unit, num_units, damaged)


def lay_out_rows(
    tokens_UT: NDArray[np.unsignedinteger],
    sequence_length: int,
    eos_id: int,
    label_at_end: int | None,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """`kernels.cpu.lay_out_rows` in numpy, for where nothing can be compiled."""
    tokens_BT, labels_BT, seq_idx_BT = out
    length = tokens_UT.shape[1] - 1
    tokens_BT.numpy().reshape(-1, length)[...] = tokens_UT[:, :-1]
    labels_BT.numpy().reshape(-1, length)[...] = tokens_UT[:, 1:]
    if label_at_end is not None:
        labels_BT[tokens_BT == eos_id] = label_at_end
    seq_idx_BT.copy_(document_index(tokens_BT, eos_id))


def validation_rows(dataset: Dataset, source: str, sequence_length: int, max_tokens: int) -> Batch:
    """The first `max_tokens` of a source's held-out stream, in whole rows.

    The end is filled up with end-of-document tokens, whose labels are ignored, so that each token
    after a document's first is predicted once. No rows if the source has no held-out document.
    """
    stream = dataset.holdout(source)
    num_rows = min(-(-len(stream) // sequence_length), max_tokens // sequence_length)
    padded = np.full(num_rows * sequence_length + 1, dataset.eos_id, dtype=dataset.dtype)
    used = stream[: len(padded)]
    padded[: len(used)] = used
    starts = np.arange(num_rows)[:, None] * sequence_length
    rows_BT = padded[starts + np.arange(sequence_length + 1)]
    source_B = np.full(num_rows, dataset.sources.index(source))
    return make_batch(rows_BT, source_B, dataset.eos_id, sequence_length)
