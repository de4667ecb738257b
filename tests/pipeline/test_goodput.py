"""Goodput: time of steps that count over all time, whatever was lost in between."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.goodput import Goodput, goodput

TOKENS = 100  # a step


def started(time: float, step: int) -> dict[str, Any]:
    return {"kind": "start", "step": step, "time": time, "metrics": {}}


def trained(first: int, last: int, time: float, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Steps `first` to `last`, which begin at `time` and take so long each."""
    return [
        {
            "kind": "train",
            "step": step,
            "time": time + (i + 1) * seconds,
            "metrics": {"train/tokens_per_second": TOKENS / seconds},
        }
        for i, step in enumerate(range(first, last + 1))
    ]


def test_a_run_that_does_nothing_but_steps_has_all_of_it() -> None:
    assert goodput([started(5, 0), *trained(1, 8, 5)], TOKENS) == Goodput(1.0, 0, 0)


def test_a_restart_costs_its_standstill_and_the_steps_done_again() -> None:
    records = [started(0, 0), *trained(1, 10, 0), started(30, 6), *trained(7, 20, 30)]
    found = goodput(records, TOKENS)
    assert found == Goodput(useful=20 / 44, restarts=1, replayed=4)


def test_each_restart_counts_what_was_done_since_the_one_before() -> None:
    records = [
        started(0, 0), *trained(1, 10, 0),
        started(10, 8), *trained(9, 9, 10),
        started(11, 8), *trained(9, 12, 11),
    ]  # fmt: skip
    found = goodput(records, TOKENS)
    assert found == Goodput(useful=12 / 15, restarts=2, replayed=2 + 1)


def test_checkpoints_and_validation_are_no_steps() -> None:
    records = [started(0, 0), *trained(1, 5, 0), *trained(6, 10, 15)]
    found = goodput(records, TOKENS)
    assert found is not None
    assert found.useful == pytest.approx(10 / 20)


def test_one_slow_step_makes_the_others_no_more_useful() -> None:
    records = [started(0, 0), *trained(1, 9, 0), *trained(10, 10, 9, seconds=11)]
    found = goodput(records, TOKENS)
    assert found is not None
    assert found.useful == pytest.approx(10 / 20)


def test_a_child_counts_from_where_it_left_its_parent() -> None:
    found = goodput([started(0, 100), *trained(101, 104, 4)], TOKENS)
    assert found == Goodput(useful=4 / 8, restarts=0, replayed=0)


def test_nothing_is_said_before_there_is_something_to_say() -> None:
    assert goodput([], TOKENS) is None
    assert goodput([started(0, 0), *trained(1, 1, 0)], TOKENS) is None
