"""What is trained on follows from content hashes, and held-out text is never among it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.config import DataConfig, SourceConfig
from pipeline.data.selection import Documents, select, tokenizer_sample
from tests.data.corpora import configuration


def documents(texts: Sequence[Sequence[str]], reserved: frozenset[str] = frozenset()) -> Documents:
    """Documents of several sources; their ids count up."""
    flat = [(number, text) for number, source in enumerate(texts) for text in source]
    hashes = b"".join(hashlib.sha256(text.encode()).digest() for _, text in flat)
    return Documents(
        id_N=np.arange(len(flat)),
        source_N=np.array([number for number, _ in flat]),
        hash_N4=np.frombuffer(hashes, ">u8").reshape(-1, 4).astype(np.uint64),
        bytes_N=np.array([len(text.encode()) for _, text in flat]),
        reserved_N=np.array([text in reserved for _, text in flat]),
    )


def config(number: int, max_bytes: int | None = None, **changes: object) -> DataConfig:
    source = SourceConfig(builtin="python", max_bytes=max_bytes)
    return configuration({f"source{i}": source for i in range(number)}, **changes)


TEXTS = [f"text {i}" * (1 + i % 5) for i in range(1_000)]


def test_a_document_is_held_out_by_its_hash_alone() -> None:
    held = select(documents([TEXTS]), config(1, holdout_fraction=0.1)).holdout[0]
    expected = {
        i
        for i, text in enumerate(TEXTS)
        if int.from_bytes(hashlib.sha256(text.encode()).digest()) < 0.1 * 2**256
    }
    assert set(held.tolist()) == expected
    assert 60 < len(expected) < 140


def test_training_and_held_out_documents_are_disjoint_and_complete() -> None:
    selection = select(documents([TEXTS]), config(1))
    parts = np.concatenate([selection.training[0], selection.holdout[0]])
    assert sorted(parts.tolist()) == list(range(1_000))


def test_both_are_in_the_order_of_hashes_whatever_the_order_of_reading() -> None:
    base = documents([TEXTS])
    order = np.random.default_rng(0).permutation(1_000)
    turned = Documents(*(getattr(base, name)[order] for name in base.__dataclass_fields__))
    for part in ("training", "holdout"):
        rows = getattr(select(base, config(1)), part)[0]
        turned_rows = getattr(select(turned, config(1)), part)[0]
        assert (base.id_N[rows] == turned.id_N[turned_rows]).all()
        assert (np.diff(base.hash_N4[rows, 0].astype(float)) > 0).all()


def test_of_equal_texts_the_first_source_keeps_one() -> None:
    selection = select(documents([["a", "b", "a"], ["b", "c", "c"]]), config(2))
    kept = [
        sorted([*selection.training[i].tolist(), *selection.holdout[i].tolist()]) for i in (0, 1)
    ]
    assert kept == [[0, 1], [4]]
    assert [counts["duplicate"] for counts in selection.counts] == [1, 2]


def test_beyond_the_cap_of_the_holdout_documents_are_neither_held_out_nor_trained_on() -> None:
    free = select(documents([TEXTS]), config(1, holdout_max_bytes=10**9))
    capped = select(documents([TEXTS]), config(1, holdout_max_bytes=500))
    assert (capped.training[0] == free.training[0]).all()
    held = capped.holdout[0]
    assert (held == free.holdout[0][: len(held)]).all()
    assert documents([TEXTS]).bytes_N[held].sum() <= 500
    assert capped.counts[0]["holdout_over_cap"] == len(free.holdout[0]) - len(held) > 0


def test_a_reserved_document_is_never_trained_on_nor_in_the_token_stream() -> None:
    reserved = frozenset(TEXTS[::10])
    selection = select(documents([TEXTS], reserved), config(1, holdout_max_bytes=600))
    chosen = set(selection.training[0]) | set(selection.holdout[0])
    assert not chosen & set(range(0, 1_000, 10))
    assert set(selection.reserved[0]) <= set(range(0, 1_000, 10))
    counts = selection.counts[0]
    assert counts["reserved"] + counts["reserved_over_cap"] == 100
    assert counts["reserved_over_cap"] > 0


def test_max_bytes_caps_the_training_part_in_whole_documents() -> None:
    found = documents([TEXTS])
    selection = select(found, config(1, max_bytes=3_000))
    free = select(found, config(1))
    size = found.bytes_N[selection.training[0]].sum()
    assert 3_000 - 60 < size <= 3_000
    assert (selection.holdout[0] == free.holdout[0]).all()
    assert selection.counts[0]["over_max_bytes"] == len(free.training[0]) - len(
        selection.training[0]
    )


def test_a_cap_below_the_first_document_still_gives_one() -> None:
    assert len(select(documents([TEXTS]), config(1, max_bytes=1)).training[0]) == 1


@pytest.mark.parametrize("total", [0, 1_000, 10_000, 10**9])
def test_the_tokenizers_sample_is_even_and_what_a_source_lacks_goes_to_the_others(
    total: int,
) -> None:
    found = documents([TEXTS[:20], TEXTS[20:500], TEXTS[500:]])
    training = select(found, config(3)).training
    sample = tokenizer_sample(found, training, total)
    sizes = [int(found.bytes_N[rows].sum()) for rows in sample]
    limits = [int(found.bytes_N[rows].sum()) for rows in training]
    for rows, available in zip(sample, training, strict=True):
        assert (rows == available[: len(rows)]).all()
    if total == 10_000:
        assert sizes[0] == limits[0]
        assert abs(sizes[1] - sizes[2]) < 100
        assert 9_800 < sum(sizes) <= 10_000
    if total == 10**9:
        assert sizes == limits
