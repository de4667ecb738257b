"""Ranks that share a global batch take the oracle's step; and the comparison can tell."""

from __future__ import annotations

from functools import cache

import pytest

from tests.oracle.codes import compare_codes
from tests.oracle.compare import Mismatch, compare_ranks, same_bits, shown
from tests.oracle.paths import walk
from tests.oracle.ranks import WALKS, walk_on_ranks
from tests.oracle.step import Step
from tests.oracle.witness import Witness

pytestmark = pytest.mark.slow

Walked = dict[str, list[tuple[Step, list[Witness]]]]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Walked]:
    return {ranks: walk_on_ranks(ranks, tmp_path_factory.mktemp("ranks")) for ranks in WALKS}


def mismatches_of(step: Step, witnesses: list[Witness]) -> list[Mismatch]:
    """Of values and of codes."""
    mismatches, passes = compare_ranks(step, witnesses)
    for witness, seen in zip(witnesses, passes, strict=True):
        mismatches += compare_codes(step, witness, seen)
    return mismatches


SOUND = [
    (ranks, name)
    for ranks, walks in WALKS.items()
    for name, walk_ in walks.items()
    if name != walk_.change.__name__
]


@pytest.mark.parametrize(("ranks", "name"), SOUND, ids=[f"{n} ranks, {name}" for n, name in SOUND])
def test_every_figure_of_two_steps_is_the_oracle_s(
    walked: dict[int, Walked], ranks: int, name: str
) -> None:
    for step, witnesses in walked[ranks][name]:
        assert len(witnesses) == ranks
        mismatches = mismatches_of(step, witnesses)
        assert not mismatches, shown(mismatches)


@pytest.mark.parametrize(("ranks", "name"), SOUND, ids=[f"{n} ranks, {name}" for n, name in SOUND])
def test_what_happens_in_a_micro_batch_does_not_depend_on_who_computes_it(
    walked: dict[int, Walked], ranks: int, name: str
) -> None:
    """From equal weights, the linears of all ranks together see the bits of one process."""
    _, alone = walk_alone(ranks, name)
    together = {
        place: call
        for witness in walked[ranks][name][0][1]
        for place, call in witness.calls.items()
    }
    assert set(together) == set(alone.calls)
    for place, call in alone.calls.items():
        assert all(same_bits(call[what], together[place][what]).all() for what in call), place


@cache
def walk_alone(ranks: int, name: str) -> tuple[Step, Witness]:
    """The first step, in this process."""
    return walk(WALKS[ranks][name].path)[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "keyed_by_local_index": {"dx", "dw"},
        "one_gradient_left_out": {"reduced", "replica"},
        "norm_of_local_gradients": {"norm", "clipped", "replica"},
        "mean_over_ranks": {"reduced"},
        "divided_by_local_count": {"dy", "loss", "num_valid", "replica"},
    }.items(),
)
def test_a_wrong_rank_is_noticed_and_nothing_beside_it(
    walked: dict[int, Walked], name: str, expected: set[str]
) -> None:
    ((step, witnesses),) = walked[2][name]
    assert {mismatch.what for mismatch in mismatches_of(step, witnesses)} == expected
