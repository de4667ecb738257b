"""Outliers of loss and gradient norm are told from their window, and never by luck."""

from __future__ import annotations

import json
import math
import random

import pytest

from pipeline.train.spikes import SpikeWindow


def window_of(values: list[float], size: int = 32, threshold: float = 6.0) -> SpikeWindow:
    window = SpikeWindow(size, threshold)
    for value in values:
        window.add(value, 1.0)
    return window


def noisy(count: int, sigma: float = 0.1) -> list[float]:
    generator = random.Random(0)
    return [3.0 + generator.gauss(0, sigma) for _ in range(count)]


def test_a_loss_far_above_the_window_is_a_spike_and_its_size_is_said() -> None:
    reason = window_of(noisy(32)).judge(4.5, 1.0)
    assert reason.startswith("loss 4.5 lies 1")
    assert "sigma above the median" in reason


def test_a_gradient_norm_is_judged_as_the_loss_is() -> None:
    window = SpikeWindow(32, 6.0)
    for value in noisy(32):
        window.add(3.0, value)
    assert "gradient norm 40" in window.judge(3.0, 40.0)
    assert window.judge(3.0, 3.1) == ""


def test_ordinary_steps_and_falls_are_no_spikes() -> None:
    window = window_of(noisy(32))
    assert window.judge(3.3, 1.0) == ""
    assert window.judge(0.1, 1.0) == ""


def test_earlier_outliers_do_not_hide_a_later_one() -> None:
    values = noisy(32)
    values[5:10] = [50.0] * 5
    assert window_of(values).judge(5.0, 1.0)


def test_nothing_is_judged_before_the_window_is_half_full_or_without_a_threshold() -> None:
    assert window_of(noisy(15)).judge(100.0, 1.0) == ""
    assert window_of(noisy(16)).judge(100.0, 1.0)
    assert window_of(noisy(32), threshold=0.0).judge(100.0, 1.0) == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_finite_values_enter(bad: float) -> None:
    window = window_of(noisy(32))
    before = list(window.values)
    window.add(bad, 1.0)
    window.add(1.0, bad)
    assert window.values == before


def test_a_flat_curve_has_no_spike_of_a_hair() -> None:
    window = window_of([3.0] * 32)
    assert window.judge(3.001, 1.0) == ""
    assert window.judge(3.3, 1.0)


def test_a_lasting_change_of_level_is_followed() -> None:
    window = window_of(noisy(32))
    judged = []
    for value in noisy(40):
        judged.append(window.judge(value + 2, 1.0))
        window.add(value + 2, 1.0)
    assert judged[0]
    assert judged[-1] == ""


def test_the_window_survives_json_to_the_bit() -> None:
    window = window_of(noisy(40))
    again = SpikeWindow(32, 6.0)
    again.values = [(loss, norm) for loss, norm in json.loads(json.dumps(window.values))]
    assert again.values == window.values
    assert len(again.values) == 32
