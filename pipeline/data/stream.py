"""Batches of a planned mixture: reads the rows that the plan names, ahead of training.

Legend: U units, B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.loss import IGNORED
from model.packing import document_index
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset

Request = tuple[int, int, int]  # first unit, number of units, sequence length


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents with their labels, and which units of the plan they are."""

    tokens_BT: Tensor  # int64
    labels_BT: Tensor  # int64, the next token; IGNORED where that starts another document
    seq_idx_BT: Tensor  # int32, number of the document within its row
    source_B: Tensor  # int64, source ids of the mixture
    first_unit: int
    num_units: int


class MixtureStream:
    """The units of a mixture over a prepared corpus, in the mixture's order.

    `unit_length` is in tokens. Holds no position: whoever reads says from where.
    """

    def __init__(self, dataset: Dataset, mixture: Mixture, unit_length: int) -> None:
        for name, size in zip(mixture.names, mixture.sizes, strict=True):
            assert size <= dataset.num_units(name, unit_length)
        self.dataset = dataset
        self.mixture = mixture
        self.unit_length = unit_length

    def read(self, first_unit: int, num_units: int, sequence_length: int) -> Batch:
        """Units first_unit .. first_unit + num_units - 1, each cut into consecutive rows.

        Raises `ValueError` if the sequence length does not divide the unit.
        """
        if self.unit_length % sequence_length:
            raise ValueError(
                f"a sequence length of {sequence_length} does not divide a unit of "
                f"{self.unit_length} tokens, the longest phase's sequence"
            )
        source_U, row_U = self.mixture.locate(np.arange(first_unit, first_unit + num_units))
        tokens_UT = self.dataset.read_units(
            [self.mixture.names[source] for source in source_U], row_U, self.unit_length
        )
        return make_batch(
            tokens_UT, source_U, self.dataset.eos_id, sequence_length, first_unit, num_units
        )

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
        self, requests: Iterable[Request], prefetch: int = 2, executor: str = "mmap"
    ) -> Iterator[Batch]:
        """The batches of the requests in order, read ahead.

        `mmap` reads `prefetch` batches ahead in a thread, which ends with the iterator; `ray` lets
        Ray Data read, for slow storage. Both give the same batches, and raise an error in reading
        where its batch would have come.
        """
        if executor == "ray":
            from pipeline.data.ray_stream import iterate_with_ray

            return iterate_with_ray(self, requests)
        assert executor == "mmap"
        return _read_ahead(lambda request: self.read(*request), requests, prefetch)


def make_batch(
    tokens_UT: NDArray[np.unsignedinteger],
    source_U: NDArray[np.int64],
    eos_id: int,
    sequence_length: int,
    first_unit: int = 0,
    num_units: int = 0,
) -> Batch:
    """Cut units into rows and label them: a document's last token predicts nothing."""
    units = torch.from_numpy(tokens_UT.astype(np.int64))
    tokens_BT = units[:, :-1].reshape(-1, sequence_length)
    labels_BT = units[:, 1:].reshape(-1, sequence_length)
    labels_BT = labels_BT.masked_fill(tokens_BT == eos_id, IGNORED)
    rows_per_unit = (tokens_UT.shape[1] - 1) // sequence_length
    return Batch(
        tokens_BT,
        labels_BT,
        document_index(tokens_BT, eos_id),
        torch.from_numpy(source_U.astype(np.int64)).repeat_interleave(rows_per_unit),
        first_unit,
        num_units,
    )


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


def _read_ahead(
    read: Callable[[Request], Batch], requests: Iterable[Request], prefetch: int
) -> Iterator[Batch]:
    """`map(read, requests)` with up to `prefetch` results computed ahead by one thread."""
    results: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(prefetch)
    closed = threading.Event()

    def put(item: tuple[Batch | None, BaseException | None]) -> None:
        while not closed.is_set():
            try:
                return results.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for request in requests:
                put((read(request), None))
                if closed.is_set():
                    return
            put((None, None))
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = results.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        closed.set()
        thread.join()
