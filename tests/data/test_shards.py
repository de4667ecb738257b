"""Prepared corpora: reading across shards, and refusing what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.data import shards
from pipeline.data.shards import DataError, Dataset, verify
from tests.data.corpora import EOS, VOCAB_SIZE, document, write_corpus

DOCUMENTS = [document(7 * i, 5 + i % 11) for i in range(20)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", {"code": DOCUMENTS, "prose": DOCUMENTS[:1]})


def test_a_source_is_one_stream_over_its_shards(corpus: Path) -> None:
    dataset, stream = Dataset.open(corpus), np.concatenate(DOCUMENTS)
    assert len(dataset.manifest["sources"]["code"]["shards"]) == 7
    assert dataset.num_tokens("code") == len(stream)
    for start in range(0, len(stream), 13):
        for count in (0, 1, 40, len(stream) - start):
            part = dataset.read("code", start, min(count, len(stream) - start))
            assert (part == stream[start : start + count]).all()


def test_the_last_unit_has_a_token_after_it_for_its_last_label(corpus: Path) -> None:
    dataset, total = Dataset.open(corpus), len(np.concatenate(DOCUMENTS))
    for length in (1, 7, 16, total - 1, total, total + 1):
        units = dataset.num_units("code", length)
        assert units * length + 1 <= total < (units + 1) * length + 1
        if units:
            assert len(dataset.read("code", (units - 1) * length, length + 1)) == length + 1


def test_reading_outside_the_stream_is_refused(corpus: Path) -> None:
    dataset = Dataset.open(corpus)
    for start, count in ((-1, 2), (0, 10**6), (10**6, 0)):
        with pytest.raises(ValueError, match="reaches outside"):
            dataset.read("code", start, count)


def test_offsets_say_where_each_document_starts_and_each_ends_with_its_only_eos(
    corpus: Path,
) -> None:
    for entry in Dataset.open(corpus).manifest["sources"]["code"]["shards"]:
        offsets = np.fromfile(corpus / entry["offsets"]["file"], "<u8").astype(int)
        tokens = np.fromfile(corpus / entry["file"], "<u2")
        assert offsets[-1] == entry["tokens"] == len(tokens)
        assert (np.flatnonzero(tokens == EOS) == offsets[1:] - 1).all()


@pytest.mark.parametrize(("vocab_size", "bits"), [(65_536, 16), (65_537, 32), (131_072, 32)])
def test_ids_are_stored_in_as_many_bits_as_they_need(vocab_size: int, bits: int) -> None:
    assert shards.token_dtype(vocab_size).itemsize * 8 == bits
    assert np.array([vocab_size - 1]).astype(shards.token_dtype(vocab_size))[0] == vocab_size - 1


def test_token_bytes_counts_the_text_of_each_id(corpus: Path) -> None:
    lengths = Dataset.open(corpus).token_bytes()
    assert len(lengths) <= VOCAB_SIZE
    assert lengths[EOS] == 0
    assert (lengths[1:257] == 1).all()
    assert lengths[257:].min() >= 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "name",
    [
        "code-00003.tokens",
        "code-00003.sums",
        "code-00003.offsets",
        "tokenizer.json",
        "holdout/code.offsets",
    ],
)
@pytest.mark.parametrize(
    ("damage", "deep", "message"),
    [
        (Path.unlink, False, "missing"),
        (truncate, False, "bytes, not"),
        (flip_a_bit, True, "SHA-256 differs"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(
    corpus: Path, name: str, damage: Callable[[Path], None], deep: bool, message: str
) -> None:
    dataset = Dataset.open(corpus)
    verify(dataset, deep=True)
    damage(corpus / name)
    with pytest.raises(DataError, match=message) as error:
        verify(dataset, deep=deep)
    assert str(corpus / name) in str(error.value)
    assert "run prepare again" in str(error.value)
    if not deep:
        with pytest.raises(DataError):
            Dataset.open(corpus)


def edit(corpus: Path, key: str, value: object) -> None:
    path = corpus / shards.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_another_format_version_is_refused_by_name(corpus: Path) -> None:
    edit(corpus, "version", 99)
    with pytest.raises(DataError, match=r"format is \('token-shards', 99\).*prepare the corpus"):
        Dataset.open(corpus)


def test_a_folder_without_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="no prepared corpus; delete the folder and run prepare again"
    ):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", "null", "\x00"])
def test_a_broken_manifest_is_refused(corpus: Path, text: str) -> None:
    (corpus / shards.MANIFEST).write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        Dataset.open(corpus)


def test_an_edited_manifest_is_refused_but_its_origin_may_change(corpus: Path) -> None:
    edit(corpus, "made_by", {"command": ["another"]})
    Dataset.open(corpus)
    edit(corpus, "sources", {})
    with pytest.raises(DataError, match="content hash"):
        Dataset.open(corpus)


def test_an_unknown_source_is_refused_with_the_nearest(corpus: Path) -> None:
    with pytest.raises(DataError, match="did you mean code"):
        Dataset.open(corpus).num_tokens("cod")
