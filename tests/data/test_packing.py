"""Rows: what best-fit packing keeps whole, and that it loses and doubles nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import packing
from pipeline.data.packing import lay_out

COUNTS = st.lists(st.integers(2, 90), min_size=1, max_size=120)


def spans(counts: np.ndarray, layout: packing.Layout) -> tuple[np.ndarray, np.ndarray]:
    """Where each document of the stream starts and ends, in the layout's order."""
    sizes = counts[layout.order_D]
    ends = np.cumsum(sizes + layout.padding_D) - layout.padding_D
    return ends - sizes, ends


@given(counts=COUNTS)
def test_concatenation_keeps_the_order_and_adds_nothing(counts: list[int]) -> None:
    layout = lay_out(np.array(counts), "concatenate", 0)
    assert layout.order_D.tolist() == list(range(len(counts)))
    assert not layout.padding_D.any()


@settings(max_examples=200, deadline=None)
@given(counts=COUNTS, row=st.integers(2, 40))
def test_best_fit_cuts_no_document_that_fits_and_starts_the_others_at_a_row(
    counts: list[int], row: int
) -> None:
    counts_D = np.array(counts)
    layout = lay_out(counts_D, "best_fit", row)
    assert sorted(layout.order_D.tolist()) == list(range(len(counts)))
    starts, ends = spans(counts_D, layout)
    fits = counts_D[layout.order_D] <= row
    assert (starts[fits] // row == (ends[fits] - 1) // row).all()
    assert (starts[~fits] % row == 0).all()
    assert (ends[-1] + layout.padding_D[-1]) % row == 1, "whole rows and the last label's token"


def test_a_document_goes_where_the_least_room_suffices() -> None:
    counts = np.array([3, 7, 5, 5, 25])
    layout = lay_out(counts, "best_fit", 10)
    # 25 leaves 5, which 5 fills; 7 leaves 3, which 3 fills; the other 5 stands alone.
    assert layout.order_D.tolist() == [4, 2, 1, 0, 3]
    assert layout.padding_D.tolist() == [0, 0, 0, 0, 5 + 1]


def test_windows_are_packed_apart_so_that_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = np.random.default_rng(0).integers(2, 60, 500)
    whole = lay_out(counts, "best_fit", 64)
    monkeypatch.setattr(packing, "WINDOW", 100)
    cut = lay_out(counts, "best_fit", 64)
    assert (cut.order_D // 100 == np.arange(500) // 100).all()
    assert 0 < whole.padding_D.sum() <= cut.padding_D.sum() < len(counts) * 64
