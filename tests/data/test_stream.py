"""Batches hold what the plan names, with labels that stay within documents."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from kernels import cpu
from pipeline.data.chunks import Chunk, PlannedChunk
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset
from pipeline.data.stream import (
    IGNORED,
    Batch,
    MixtureStream,
    Stored,
    lay_out_rows,
    validation_rows,
)
from tests.data.corpora import EOS, document, write_corpus

UNIT = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    documents = [document(3 * i, 3 + (5 * i) % 23) for i in range(120)]
    folder = write_corpus(
        tmp_path_factory.mktemp("stream") / "corpus",
        {"code": documents[:70], "prose": documents[70:]},
        holdout=[document(50, 9), document(90, 30), document(120, 3)],
    )
    return Dataset.open(folder)


@pytest.fixture(scope="module")
def stream(dataset: Dataset) -> MixtureStream:
    sources = {name: dataset.num_units(name, UNIT) for name in dataset.sources}
    phases = [(37, {"code": 0.5, "prose": 0.5}), (400, {"code": 0.2, "prose": 0.8})]
    return MixtureStream(dataset, Mixture(sources, phases, block=20), UNIT)


def equal(one: Batch, other: Batch) -> bool:
    fields = ("tokens_BT", "labels_BT", "seq_idx_BT", "source_B")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in fields)


def test_rows_are_the_slices_that_the_plan_names(stream: MixtureStream) -> None:
    batch = stream.read(30, 25, UNIT)
    source, row = stream.mixture.locate(np.arange(30, 55))
    assert (batch.first_unit, batch.num_units) == (30, 25)
    assert batch.source_B.tolist() == source.tolist()
    for i in range(25):
        name = stream.mixture.names[source[i]]
        expected = stream.dataset.read(name, int(row[i]) * UNIT, UNIT)
        assert batch.tokens_BT[i].tolist() == expected.tolist()


def test_types(stream: MixtureStream) -> None:
    batch = stream.read(0, 2, 8)
    assert batch.tokens_BT.dtype == batch.labels_BT.dtype == batch.source_B.dtype == torch.int64
    assert batch.seq_idx_BT.dtype == torch.int32
    assert batch.tokens_BT.shape == batch.labels_BT.shape == batch.seq_idx_BT.shape == (4, 8)


def test_a_label_is_the_next_token_and_none_crosses_a_documents_end(stream: MixtureStream) -> None:
    source, row = stream.mixture.locate(np.arange(60))
    batch = stream.read(0, 60, UNIT)
    assert (batch.labels_BT == IGNORED).equal(batch.tokens_BT == EOS)
    for i in range(60):
        name = stream.mixture.names[source[i]]
        following = stream.dataset.read(name, int(row[i]) * UNIT + 1, UNIT).tolist()
        for token, label, after in zip(
            batch.tokens_BT[i].tolist(), batch.labels_BT[i].tolist(), following, strict=True
        ):
            assert label == (IGNORED if token == EOS else after)


def test_documents_are_numbered_within_their_row(stream: MixtureStream) -> None:
    batch = stream.read(0, 40, UNIT)
    ends = (batch.tokens_BT == EOS).long()
    assert batch.seq_idx_BT.equal((ends.cumsum(1) - ends).int())


@pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("label_at_end", [IGNORED, None])
@pytest.mark.parametrize(("length", "row"), [(16, 4), (300, 150), (1024, 1024), (130, 65)])
def test_the_compiled_layout_equals_the_plain_one(
    dtype: type, label_at_end: int | None, length: int, row: int
) -> None:
    for share in (0.0, 0.004, 0.3, 1.0):
        random = np.random.default_rng(length)
        tokens_UT = random.integers(1, 60_000, (9, length + 1)).astype(dtype)
        tokens_UT[random.random(tokens_UT.shape) < share] = EOS
        found = []
        for lay_out in (cpu.lay_out_rows, lay_out_rows):
            shape = (9 * length // row, row)
            out = tuple(torch.full(shape, -7, dtype=t) for t in (torch.int64,) * 2 + (torch.int32,))
            lay_out(tokens_UT, row, EOS, label_at_end, out)
            found.append(out)
        assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_a_shorter_sequence_cuts_the_same_units_into_consecutive_rows(
    stream: MixtureStream,
) -> None:
    whole, halves = stream.read(5, 10, UNIT), stream.read(5, 10, UNIT // 2)
    for name in ("tokens_BT", "labels_BT"):
        assert getattr(halves, name).equal(getattr(whole, name).reshape(20, UNIT // 2))
    assert halves.source_B.equal(whole.source_B.repeat_interleave(2))
    with pytest.raises(ValueError, match="does not divide a unit of 16"):
        stream.read(0, 1, 5)


def test_batches_do_not_depend_on_how_units_are_grouped(stream: MixtureStream) -> None:
    whole = stream.read(0, 24, UNIT)
    parts = [stream.read(first, 3, UNIT) for first in range(0, 24, 3)]
    assert torch.cat([part.tokens_BT for part in parts]).equal(whole.tokens_BT)
    assert torch.cat([part.labels_BT for part in parts]).equal(whole.labels_BT)


def test_three_epochs_read_every_row_three_times_wherever_training_resumes(
    dataset: Dataset,
) -> None:
    rows = dataset.num_units("prose", UNIT)
    mix = Mixture({"code": 1, "prose": rows}, [(3 * rows, {"prose": 1.0})], block=7)
    stream = MixtureStream(dataset, mix, UNIT)
    whole = stream.read(0, 3 * rows, UNIT).tokens_BT
    for step in range(0, 3 * rows, 5):  # a stream built anew has no position to lose
        resumed = MixtureStream(dataset, mix, UNIT).read(step, 3 * rows - step, UNIT)
        assert resumed.tokens_BT.equal(whole[step:])
    epochs = whole.reshape(3, rows, UNIT).tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1]


def test_iterate_gives_the_batches_of_the_requests_in_order(stream: MixtureStream) -> None:
    requests = [(first, 4, UNIT if first < 80 else UNIT // 2) for first in range(0, 160, 4)]
    batches = list(stream.iterate(requests, prefetch_bytes=20 * stream.unit_bytes))
    assert [batch.first_unit for batch in batches] == [first for first, _, _ in requests]
    assert all(
        equal(batch, stream.read(*request))
        for batch, request in zip(batches, requests, strict=True)
    )


@pytest.mark.parametrize("most", [8, 40])
def test_no_more_bytes_are_held_ahead_than_asked(
    stream: MixtureStream, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, plain = [], stream.read_chunk
    monkeypatch.setattr(
        stream,
        "read_chunk",
        lambda planned, out: (read.extend(planned.requests), plain(planned, out))[1],
    )
    requests = ((first, 2, UNIT) for first in range(0, 300, 2))
    batches = stream.iterate(requests, prefetch_bytes=most * stream.unit_bytes)
    for used in range(1, 100):
        next(batches)
        time.sleep(0.001)
        assert 2 * (len(read) - used + 1) <= most  # the one in use counts, too
    assert 2 * (len(read) - used) > most / 3
    batches.close()


def test_an_error_while_reading_ahead_is_raised_where_its_batch_would_come(
    stream: MixtureStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = stream.read_chunk

    def broken(planned: PlannedChunk, out: Stored) -> Chunk:
        if planned.requests[0][0] == 1:
            raise OSError("the store is away")
        return plain(planned, out)

    monkeypatch.setattr(stream, "read_chunk", broken)
    requests = [(unit, 1, UNIT) for unit in range(3)]
    batches = stream.iterate(requests, prefetch_bytes=4 * stream.unit_bytes)
    assert next(batches).first_unit == 0
    with pytest.raises(OSError, match="the store is away"):
        next(batches)


def test_batches_stay_as_they_are_when_what_they_were_read_into_is_used_again(
    stream: MixtureStream,
) -> None:
    requests = [(first, 2, UNIT) for first in range(0, 200, 2)]
    batches = list(stream.iterate(requests, prefetch_bytes=8 * stream.unit_bytes))
    for batch, request in zip(batches, requests, strict=True):
        assert equal(batch, stream.read(*request))


def test_closing_an_iterator_ends_its_thread(stream: MixtureStream) -> None:
    batches = stream.iterate((first, 1, UNIT) for first in range(300))
    next(batches)
    assert any(thread.name.startswith("read-ahead") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_ray_data_reads_the_same_batches(
    stream: MixtureStream, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    from pipeline.data import ray_stream

    monkeypatch.setattr(ray_stream, "WINDOW", 7)
    monkeypatch.setattr(ray_stream, "CHUNK_UNITS", 16)
    requests = [(first, 4, UNIT if first < 80 else UNIT // 2) for first in range(20, 180, 4)]
    batches = list(stream.iterate(requests, executor="ray"))
    assert len(batches) == len(requests)
    for batch, other in zip(batches, stream.iterate(requests), strict=True):
        assert (batch.first_unit, batch.num_units) == (other.first_unit, other.num_units)
        assert equal(batch, other)


@pytest.mark.slow
def test_a_reader_of_ray_data_that_is_killed_loses_and_repeats_nothing(
    stream: MixtureStream, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    from pipeline.data import ray_stream

    monkeypatch.setattr(ray_stream, "CHUNK_UNITS", 4)
    requests = [(first, 2, UNIT) for first in range(0, 400, 2)]
    killed: list[int] = []

    def kill_readers() -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "".join(process.cmdline()).startswith("ray::MapBatches"):
                    process.kill()
                    killed.append(process.pid)

    found = []
    for batch in stream.iterate(requests, executor="ray"):
        if len(killed) < 3:
            kill_readers()
        found.append(batch)
    assert killed
    assert len(found) == len(requests)
    for batch, request in zip(found, requests, strict=True):
        assert batch.first_unit == request[0]
        assert equal(batch, stream.read(*request))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_for_a_gpu_lie_in_page_locked_memory(stream: MixtureStream) -> None:
    [batch] = stream.iterate([(0, 4, UNIT)], pin=True)
    for name in ("tokens_BT", "labels_BT", "seq_idx_BT", "source_B"):
        assert getattr(batch, name).is_pinned()


def test_labels_go_on_into_the_next_document_where_that_is_configured(
    dataset: Dataset, stream: MixtureStream
) -> None:
    across = MixtureStream(dataset, stream.mixture, UNIT, across_documents=True)
    plain, batch = stream.read(0, 40, UNIT), across.read(0, 40, UNIT)
    assert batch.tokens_BT.equal(plain.tokens_BT)
    ends = batch.tokens_BT == EOS
    assert batch.labels_BT[~ends].equal(plain.labels_BT[~ends])
    assert (batch.labels_BT != IGNORED).all()
    assert batch.labels_BT[:, :-1].equal(batch.tokens_BT[:, 1:])


def test_validation_rows_predict_every_held_out_token_after_a_documents_first_once(
    dataset: Dataset,
) -> None:
    batch = validation_rows(dataset, "prose", 8, 10**6)
    stream = dataset.holdout("prose").tolist()
    assert batch.tokens_BT.shape == (6, 8)  # 45 tokens
    assert batch.tokens_BT.flatten().tolist() == stream + [EOS] * 3
    labels = batch.labels_BT.flatten()
    expected = [after for token, after in itertools.pairwise(stream) if token != EOS]
    assert labels[labels != IGNORED].tolist() == expected
    assert set(batch.source_B.tolist()) == {1}


def test_validation_rows_stop_at_whole_rows_within_max_tokens(dataset: Dataset) -> None:
    batch = validation_rows(dataset, "code", 8, 20)
    assert batch.tokens_BT.flatten().tolist() == dataset.holdout("code")[:16].tolist()
    assert batch.labels_BT[1, -1] == dataset.holdout("code")[16]


def test_a_source_without_held_out_documents_has_no_validation_rows(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus", {"code": [document(0, 50)]})
    assert validation_rows(Dataset.open(folder), "code", 8, 1000).tokens_BT.shape == (0, 8)
