"""One schedule: phases, the WSD learning rate, boundaries and fingerprints."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipeline.config import ConfigError, PhaseConfig, TrainConfig
from pipeline.train.schedule import Schedule

SOURCES = ("code", "prose")


def train_config(**changes: object) -> TrainConfig:
    """100 steps of 4 units of 8 tokens."""
    base = TrainConfig(
        tokens=3200,
        sequence_length=8,
        global_batch=4,
        micro_batch=2,
        phases=(
            PhaseConfig(blend={"code": 1.0, "prose": 1.0}),
            PhaseConfig(start="50%", blend={"code": 3.0, "prose": 1.0}),
            PhaseConfig(start="80%", learning_rate="decay"),
            PhaseConfig(start="90%", precision="bf16_forward", sequence_length=4),
        ),
        learning_rate=1.0,
        final_learning_rate=0.01,
        warmup_tokens=320,
    )
    return dataclasses.replace(base, **changes)


def schedule(**changes: object) -> Schedule:
    return Schedule.of(train_config(**changes), SOURCES)


def test_what_a_phase_leaves_out_goes_on_as_before() -> None:
    phases = schedule().phases
    assert [phase.start_step for phase in phases] == [0, 50, 80, 90]
    assert phases[2].blend == phases[1].blend == {"code": 0.75, "prose": 0.25}
    assert [phase.learning_rate for phase in phases] == ["stable", "stable", "decay", "decay"]
    assert [phase.precision for phase in phases] == ["recipe"] * 3 + ["bf16_forward"]
    assert [phase.sequence_length for phase in phases] == [8, 8, 8, 4]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.1),  # first step of a 10-step warm-up
        (9, 1.0),  # the warm-up's last
        (10, 1.0),
        (79, 1.0),  # the last stable step
        (80, 1.0 - 0.99 / 20),  # the decay's first
        (99, 0.01),  # the run's last step reaches the final rate
    ],
)
def test_learning_rate_table(step: int, expected: float) -> None:
    assert schedule().learning_rate(step) == pytest.approx(expected, rel=1e-12)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert schedule(warmup_tokens=0).learning_rate(0) == 1.0


def test_no_decay_stays_at_the_peak() -> None:
    phases = (PhaseConfig(blend={"code": 1.0}),)
    assert schedule(phases=phases).learning_rate(99) == 1.0


def test_warm_up_and_decay_that_fill_the_run() -> None:
    phases = (PhaseConfig(blend={"code": 1.0}), PhaseConfig(start="10%", learning_rate="decay"))
    rates = schedule(phases=phases).learning_rates(np.arange(100))
    assert rates[9] == 1.0
    assert rates[10] < 1.0
    assert rates[99] == pytest.approx(0.01)
    assert (np.diff(rates[9:]) < 0).all()


def test_mixture_phases_merge_where_the_blend_does_not_change() -> None:
    assert schedule().mixture_phases() == [
        (50 * 4, {"code": 0.5, "prose": 0.5}),
        (100 * 4, {"code": 0.75, "prose": 0.25}),
    ]


def test_a_first_blend_left_out_means_equal_shares() -> None:
    assert schedule(phases=(PhaseConfig(),)).phases[0].blend == {"code": 0.5, "prose": 0.5}


def test_boundaries_are_the_steps_at_which_a_phase_begins() -> None:
    assert schedule().boundaries() == (50, 80, 90)


def test_the_past_decides_the_fingerprint_and_the_future_does_not() -> None:
    planned = schedule()
    longer_tail = schedule(
        phases=(*train_config().phases[:2], PhaseConfig(start="60%", blend={"prose": 1.0}))
    )
    assert planned.fingerprint(60) == longer_tail.fingerprint(60)
    assert planned.fingerprint(61) != longer_tail.fingerprint(61)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": ()}, "train.phases: empty"),
        ({"phases": (PhaseConfig(blend={"cod": 1.0}),)}, "did you mean code"),
        ({"phases": (PhaseConfig(blend={"code": 0.0}),)}, "add up to 0"),
        ({"phases": (PhaseConfig(blend={"code": -1.0}),)}, "cannot be negative or infinite"),
        ({"phases": (PhaseConfig(start="10%", blend={"code": 1.0}),)}, "starts at 0"),
        (
            {"phases": (PhaseConfig(blend={"code": 1.0}), PhaseConfig(start="120%"))},
            "outside the run",
        ),
        (
            {"phases": (PhaseConfig(blend={"code": 1.0}), PhaseConfig(start=3))},
            "not after the phase before",
        ),
        (
            {"phases": (PhaseConfig(blend={"code": 1.0}, sequence_length=3),)},
            "does not divide",
        ),
        (
            {"phases": (PhaseConfig(blend={"code": 1.0}, precision="fp4"),)},
            "known: bf16, bf16_forward, recipe",
        ),
        ({"warmup_tokens": 3000}, "warm-up ends at step 94, after the decay starts"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(**changes)
