"""The first 50 steps of each precision are what they were, to the last bit."""

from __future__ import annotations

import pytest

from tests.golden.curves import PRECISIONS, STEPS, curve, key, known


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_first_steps_are_what_they_were(precision: str) -> None:
    curves = known().get(key())
    if curves is None:
        pytest.skip(f"no golden curve for {key()}; write it: python -m tests.golden")
    found = curve(precision)
    assert len(found) == STEPS
    assert found == curves[precision]


def test_precisions_give_different_curves() -> None:
    for curves in known().values():
        assert len({tuple(curves[precision]) for precision in PRECISIONS}) == len(PRECISIONS)
