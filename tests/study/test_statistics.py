"""Paired gaps, intervals and power, against what is known of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pipeline.curves import Curve
from pipeline.runs import RunFolder
from pipeline.study.statistics import Noise, final_loss, paired, tokens_to_match, trend
from pipeline.study.tables import binned, checkpoint_bytes
from tests.study.synthetic import tables


def test_a_pair_cancels_what_its_batches_share() -> None:
    gaps = paired(tables({"mxfp4": 0.01}, noise=0.0), "mxfp4", "bf16", "main", 0.1)
    assert list(gaps) == [0, 1, 2]
    assert list(gaps.values()) == pytest.approx([0.01] * 3, abs=1e-12)


def test_a_run_forked_within_the_window_is_paired_on_its_own_steps() -> None:
    made = tables({"nvfp4_paper": 0.01}, noise=0.0, late=0.003)
    gaps = paired(made, "late_bf16", "bf16", "main", window=0.5)
    assert gaps == pytest.approx(dict.fromkeys(range(3), 0.003), abs=1e-12)


def test_an_interval_is_student_s_over_pooled_deviations() -> None:
    groups = [[0.01, 0.02, 0.03], [0.5, 0.51], [7.0]]
    noise = Noise.pooled(groups)
    assert noise.freedom == 3
    assert noise.deviation == pytest.approx(math.sqrt((2 * 0.01**2 + 2 * 0.005**2) / 3))
    half = stats.t.ppf(0.975, 3) * noise.deviation / math.sqrt(3)
    estimate = noise.estimate(groups[0])
    assert (estimate.low, estimate.high) == pytest.approx((0.02 - half, 0.02 + half))
    one = noise.estimate(groups[2])
    assert one.high - one.mean == pytest.approx(half * math.sqrt(3))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        groups = rng.normal(0.3, 0.1, (4, 3))
        estimate = Noise.pooled(list(groups)).estimate(list(groups[0]))
        held += estimate.low <= 0.3 <= estimate.high
    assert 0.935 < held / 2000 < 0.965


def test_without_a_second_seed_nothing_is_claimed() -> None:
    estimate = Noise.pooled([[0.1], [0.2]]).estimate([0.1])
    assert estimate.differs is None
    assert math.isnan(estimate.low)


def test_power_is_the_share_of_studies_that_see_the_effect() -> None:
    rng = np.random.default_rng(1)
    draws = rng.normal(0.01, 0.008, (4000, 5))
    seen = np.abs(stats.ttest_1samp(draws, 0, axis=1).statistic) > stats.t.ppf(0.975, 4)
    noise = Noise(0.008, 10)
    assert noise.power(0.01, 5) == pytest.approx(seen.mean(), abs=0.02)
    needed = noise.seeds_needed(0.01)
    assert needed is not None
    assert noise.power(0.01, needed) >= 0.8 > noise.power(0.01, needed - 1)


def test_without_any_noise_every_effect_is_seen() -> None:
    noise = Noise.pooled([[0.01, 0.01], [0.02, 0.02]])
    assert noise.seeds_needed(0.01) == 2
    assert noise.seeds_needed(0.0) is None


def test_a_run_whose_checkpoints_were_removed_has_no_size_of_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert checkpoint_bytes(run) == {}
    for step, size in ((1, 100), (2, 30)):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (run.checkpoints / f"step-{step:08d}" / "file").write_bytes(bytes(size))
    assert checkpoint_bytes(run) == {"checkpoint_bytes": 30.0}


def test_a_trend_needs_three_sizes_and_finds_a_line() -> None:
    assert trend([1e6, 1e7], [0.01, 0.02]) is None
    found = trend([1e6, 1e7, 1e8, 1e6], [0.01, 0.02, 0.03, 0.01])
    assert found is not None
    assert found.slope == pytest.approx(0.01)
    assert found.low <= 0.01 <= found.high + 1e-12


def test_tokens_to_match_are_interpolated_in_their_logarithm() -> None:
    losses = {1e6: 2.0, 4e6: 1.8}
    assert tokens_to_match(1.9, losses) == pytest.approx(2e6)
    assert tokens_to_match(2.0, losses) == pytest.approx(1e6)
    assert tokens_to_match(1.7, losses) is None
    assert tokens_to_match(2.1, losses) is None


def test_bins_are_the_same_for_runs_that_begin_later() -> None:
    edges = np.linspace(0, 100, 11)
    whole = Curve(np.arange(1.0, 101.0), np.arange(1.0, 101.0))
    late = Curve(whole.tokens[55:], whole.values[55:])
    a, b = binned(whole, edges), binned(late, edges)
    assert list(a.tokens) == [10.0 * n for n in range(1, 11)]
    assert list(a.values) == [10 * n - 4.5 for n in range(1, 11)]
    assert list(b.tokens) == [60.0, 70.0, 80.0, 90.0, 100.0]
    assert list(b.values[1:]) == list(a.values[6:])


def test_a_final_loss_is_that_of_the_last_tokens() -> None:
    curve = Curve(np.arange(1.0, 101.0), np.r_[np.full(90, 5.0), np.full(10, 2.0)])
    assert final_loss(curve, 0.1) == 2.0
    assert final_loss(curve, 0.2) == pytest.approx(3.5)
