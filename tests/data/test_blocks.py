"""Shards are checked as they are read, mapped or by range; what is damaged is named, no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from kernels import cpu
from pipeline.data.blocks import BLOCK, DamagedShardError, block_sums
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset
from pipeline.data.stream import IGNORED, MixtureStream
from tests.data.corpora import document, write_corpus
from tests.data.stores import LATENCY, SlowStore, upload

UNIT = 96
DOCUMENTS = [document(7 * i, 150 + (31 * i) % 300) for i in range(24)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sources in shards of some 900 tokens: a few blocks each, and an incomplete one."""
    return write_corpus(tmp_path / "corpus", {"code": DOCUMENTS[:15], "prose": DOCUMENTS[15:]})


def stream_of(folder: Path, uri: str | None = None) -> MixtureStream:
    dataset = Dataset.open(folder, uri, check_shards=False)
    sizes = {name: dataset.num_units(name, UNIT) for name in dataset.sources}
    mix = Mixture(sizes, [(5_000, {"code": 0.6, "prose": 0.4})], block=16)
    return MixtureStream(dataset, mix, UNIT)


def test_a_sum_changes_with_any_byte_and_zeros_complete_the_last_block() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 3 * BLOCK + 40, dtype=np.uint8)
    sums = block_sums(raw)
    for place in range(0, len(raw), 41):
        changed = raw.copy()
        changed[place] ^= 1 << place % 8
        assert np.flatnonzero(block_sums(changed) != sums).tolist() == [place // BLOCK]
    padded = np.concatenate([raw, np.zeros(BLOCK - 40, np.uint8)])
    assert block_sums(padded).tolist() == sums.tolist()


@pytest.mark.parametrize(
    ("uri", "compiled"), [(None, True), (None, False), ("memory://corpus", True)]
)
def test_units_are_the_stream_s_wherever_shards_and_blocks_end(
    folder: Path, uri: str | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(cpu, "available", lambda: False)
    if uri:
        upload(folder, uri)
    dataset = Dataset.open(folder, uri)
    whole = {"code": np.concatenate(DOCUMENTS[:15]), "prose": np.concatenate(DOCUMENTS[15:])}
    for length in (1, 7, UNIT, 256, 700):
        for source, name in enumerate(whole):
            rows = np.random.default_rng(length).permutation(dataset.num_units(name, length))
            tokens, damaged = dataset.read_units(
                tuple(whole), np.full(len(rows), source), rows, length
            )
            assert not damaged
            for row, unit in zip(rows.tolist(), tokens, strict=True):
                assert (unit == whole[name][row * length :][: length + 1]).all()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def of_another_tokenizer(path: Path) -> None:
    ids = np.fromfile(path, "<u2")
    ((ids * 7 + 1) % 299).astype("<u2").tofile(path)


DAMAGES = [flip, truncate, Path.unlink, of_another_tokenizer]


@pytest.mark.parametrize(
    ("uri", "compiled"), [(None, True), (None, False), ("memory://damaged", True)]
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_by_the_units_that_need_it_and_leaves_the_rest(
    folder: Path,
    damage: Callable[[Path], None],
    uri: str | None,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(cpu, "available", lambda: False)
    sound = stream_of(folder).read(0, 200, UNIT)
    damage(folder / "code-00003.tokens")
    if uri:
        fsspec.filesystem("memory").store.clear()
        upload(folder, uri)
    stream = stream_of(folder, uri)
    batch = stream.read(0, 200, UNIT)
    assert batch.damaged == {"code-00003.tokens"}
    lost = 0
    for unit in range(200):
        one = stream.read(unit, 1, UNIT)
        rows = (batch.tokens_BT[unit], sound.tokens_BT[unit])
        if one.damaged:
            lost += 1
            assert (batch.labels_BT[unit] == IGNORED).all()
            assert stream.mixture.names[batch.source_B[unit]] == "code"
        else:
            assert torch.equal(*rows)
            assert batch.labels_BT[unit].equal(sound.labels_BT[unit])
    assert 0 < lost < 80
    with pytest.raises(DamagedShardError, match=r"code-00003\.tokens.*data\.on_corrupt=skip"):
        stream.dataset.read("code", 0, stream.dataset.num_tokens("code"))


def test_a_file_cut_short_after_it_was_mapped_is_named_and_kills_nothing(folder: Path) -> None:
    stream = stream_of(folder)
    stream.read(0, 200, UNIT)
    truncate(folder / "prose-00000.tokens")
    assert stream.read(0, 200, UNIT).damaged == {"prose-00000.tokens"}


def test_damage_is_told_of_the_batch_that_met_it_wherever_a_chunk_ends(folder: Path) -> None:
    flip(folder / "code-00006.tokens")
    stream = stream_of(folder)
    requests = [(first, 3, UNIT) for first in range(0, 600, 3)]
    alone = [stream.read(*request).damaged for request in requests]
    assert len(set(alone)) == 2
    for most in (5, 50, 5_000):
        ahead = stream.iterate(requests, prefetch_bytes=4 * most * stream.unit_bytes)
        assert [batch.damaged for batch in ahead] == alone


def test_ranges_are_requested_at_once_with_little_more_than_their_bytes(folder: Path) -> None:
    stream = stream_of(folder, upload(folder, "slow://counted"))
    SlowStore.requests, SlowStore.most_at_once = [], 0
    stream.read(0, 40, UNIT)
    assert SlowStore.most_at_once >= 16
    crossing = sum(  # units over the border of two shards are two ranges
        len(stream.dataset.shards_of_unit(stream.mixture.names[source], int(row), UNIT)) - 1
        for source, row in zip(*stream.mixture.locate(np.arange(40)), strict=True)
    )
    assert len(SlowStore.requests) == 2 * (40 + crossing)
    assert max(SlowStore.requests) <= 2 * (UNIT + 1) + 2 * BLOCK


@pytest.mark.slow
def test_no_step_of_30000_tokens_a_second_waits_for_a_store_of_50_ms(tmp_path: Path) -> None:
    documents = [document(i, 700 + i % 90) for i in range(300)]
    folder = write_corpus(tmp_path / "corpus", {"code": documents}, documents_per_shard=30)
    dataset = Dataset.open(folder, upload(folder, "slow://steady"))
    unit, per_step = 512, 8
    mix = Mixture({"code": dataset.num_units("code", unit)}, [(10_000, {"code": 1.0})], block=16)
    requests = [(first, per_step, unit) for first in range(0, 40 * per_step, per_step)]
    batches = MixtureStream(dataset, mix, unit).iterate(requests)
    next(batches)
    waits = []
    for _ in range(25):
        time.sleep(unit * per_step / 30_000)
        began = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - began)
    batches.close()
    assert max(waits) < LATENCY  # one request alone would take as long
