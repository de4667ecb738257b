"""The order of training is a pure function with exact shares, whole epochs and stable resume."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import ConfigError
from pipeline.data.mixture import CYCLE, Mixture
from pipeline.data.permutation import keyed, permute

SOURCES = {"code": 40, "prose": 17, "mathematics": 300}
PHASES = [
    (5_000, {"code": 0.5, "prose": 0.3, "mathematics": 0.2}),
    (9_123, {"code": 0.3, "prose": 0.4, "mathematics": 0.3}),
    (20_000, {"mathematics": 0.7, "code": 0.3}),
]


def mixture(**changes: object) -> Mixture:
    return Mixture(**({"sources": SOURCES, "phases": PHASES, "block": 64, "seed": 3} | changes))  # type: ignore[arg-type]


def rows_of(mix: Mixture, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    """The rows of one source in the order in which the plan takes them."""
    source, row = mix.locate(np.arange(start, len(mix) if stop is None else stop))
    return row[source == mix.names.index(name)]


def test_any_split_over_batches_and_ranks_gives_the_same_units() -> None:
    whole = mixture().locate(np.arange(20_000))
    order = np.random.default_rng(0).permutation(20_000)
    shuffled = mixture().locate(order)
    one_by_one = [mixture().locate(np.array([i])) for i in range(0, 20_000, 1_777)]
    for part in (0, 1):
        assert (shuffled[part] == whole[part][order]).all()
        assert [int(each[part][0]) for each in one_by_one] == whole[part][::1_777].tolist()


@settings(max_examples=15, deadline=None)
@given(
    global_batch=st.integers(1, 40),
    segments=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), min_size=1, max_size=4),
)
def test_every_index_is_read_once_whatever_the_ranks_and_the_stops(
    global_batch: int, segments: list[tuple[int, int]]
) -> None:
    """A segment is (ranks, steps) between two restarts; a rank reads a slice of each batch."""
    mix, read, position = mixture(), [], 0
    for ranks, steps in segments:
        for _ in range(steps):
            batch = np.arange(position, position + global_batch)
            read += [mix.locate(part) for part in np.array_split(batch, ranks)]
            position += global_batch
    expected = mix.locate(np.arange(position))
    for part in (0, 1):
        assert (np.concatenate([each[part] for each in read]) == expected[part]).all()


@pytest.mark.parametrize("name", SOURCES)
def test_each_epoch_of_a_source_is_a_permutation_of_all_its_rows(name: str) -> None:
    rows, size = rows_of(mixture(), name), SOURCES[name]
    epochs = rows[: len(rows) // size * size].reshape(-1, size)
    assert len(epochs) >= 4
    assert (np.sort(epochs, axis=1) == np.arange(size)).all()
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    rest = rows[len(epochs) * size :]
    assert len(set(rest)) == len(rest)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.05, 1), min_size=2, max_size=6),
    block=st.integers(200, 300),
    length=st.integers(1, 5_000),
    start=st.integers(0, 3),
)
def test_each_block_holds_each_share_rounded_up_or_down(
    weights: list[float], block: int, length: int, start: int
) -> None:
    names = [f"source{i}" for i in range(len(weights))]
    blend = dict(zip(names, weights, strict=True))
    phases = [(start, {names[0]: 1.0})] if start else []
    mix = Mixture(dict.fromkeys(names, 10**6), [*phases, (start + length, blend)], block)
    source, _ = mix.locate(np.arange(start, start + length))
    share = np.array(weights) / sum(weights)
    for begin in range(0, length - block + 1, block):  # blocks count from the phase's start
        counts = np.bincount(source[begin : begin + block], minlength=len(names))
        assert (np.abs(counts - share * block) < 1 + 2 / CYCLE).all()


def test_shares_are_exact_over_a_cycle_of_blocks() -> None:
    weights = {"code": 0.123, "prose": 0.307, "mathematics": 0.57}
    mix = mixture(phases=[(64 * CYCLE, weights)])
    used = mix.used(64 * CYCLE)
    for name, weight in weights.items():
        assert abs(used[name] - weight * 64 * CYCLE) <= 1


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=2, max_size=4),
    shares=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=4, max_size=4),
    added=st.integers(0, 9),
)
def test_a_sources_order_runs_on_through_phases_whatever_else_is_in_the_blend(
    lengths: list[int], shares: list[tuple[int, int]], added: int
) -> None:
    """Each phase takes the next range of each source's own order, and a new source moves none."""
    ends = np.cumsum(lengths).tolist()
    blends = [{"code": float(c), "prose": float(p), "added": float(added)} for c, p in shares]
    sizes = {"code": 40, "prose": 17, "added": 5}
    mix = Mixture(sizes, list(zip(ends, blends, strict=False)), block=64, seed=3)
    for name in ("code", "prose"):
        rows = rows_of(mix, name)
        alone = Mixture({name: sizes[name]}, [(len(rows) + 1, {name: 1.0})], block=64, seed=3)
        assert rows.tolist() == rows_of(alone, name, stop=len(rows)).tolist()


def test_a_boundary_inside_a_block_neither_skips_nor_repeats_units_of_a_source() -> None:
    """Per source, what the phases take are consecutive ranges of its one order."""
    for name in ("code", "prose", "mathematics"):
        whole = rows_of(mixture(phases=[(20_000, {name: 1.0})]), name)
        blended = rows_of(mixture(), name)
        assert (blended == whole[: len(blended)]).all()


def test_used_counts_the_units_below_an_index() -> None:
    mix = mixture()
    source, _ = mix.locate(np.arange(len(mix)))
    for index in (0, 1, 63, 64, 4_999, 5_000, 5_001, 9_123, 15_001, 20_000):
        counted = np.bincount(source[:index], minlength=3)
        assert list(mix.used(index).values()) == counted.tolist()
    assert mix.epochs()[2]["prose"] == 0
    assert mix.epochs()[0]["code"] == pytest.approx(2_500 / 40, rel=0.01)


def test_adding_a_source_leaves_the_others_orders_as_they_were() -> None:
    more = mixture(sources={"aaa": 9, **SOURCES}, phases=[(9_000, {**PHASES[0][1], "aaa": 0.4})])
    for name in SOURCES:
        rows = rows_of(more, name)
        assert (rows == rows_of(mixture(phases=[(20_000, {name: 1.0})]), name)[: len(rows)]).all()


def test_order_of_the_mapping_decides_ids_only() -> None:
    turned = mixture(sources=dict(reversed(SOURCES.items())))
    source, row = mixture().locate(np.arange(20_000))
    turned_source, turned_row = turned.locate(np.arange(20_000))
    assert (row == turned_row).all()
    assert (source == 2 - turned_source).all()


def test_seed_changes_places_and_rows() -> None:
    one, other = mixture().locate(np.arange(640)), mixture(seed=4).locate(np.arange(640))
    assert (one[0] != other[0]).mean() > 0.3
    assert (one[1] != other[1]).mean() > 0.8


def test_fingerprint_covers_the_plan_up_to_an_index_and_no_further() -> None:
    base = mixture()
    longer = mixture(phases=[*PHASES[:2], (50_000, PHASES[2][1])])
    replanned = mixture(phases=[*PHASES[:2], (50_000, {"prose": 1.0})])
    assert base.fingerprint(20_000) == longer.fingerprint(20_000)
    assert base.fingerprint(20_000) != replanned.fingerprint(20_000)
    assert base.fingerprint(9_123) == replanned.fingerprint(9_123)
    assert base.fingerprint(9_124) != replanned.fingerprint(9_124)
    assert base.fingerprint(100) != base.fingerprint(101)
    for changed in (mixture(seed=4), mixture(block=65), mixture(sources={**SOURCES, "code": 41})):
        assert changed.fingerprint(10) != base.fingerprint(10)
    assert mixture(sources={**SOURCES, "unused": 5}).fingerprint(10) == base.fingerprint(10)


def test_extending_or_replanning_a_run_keeps_the_units_before_it() -> None:
    replanned = mixture(phases=[*PHASES[:2], (12_345, PHASES[2][1]), (30_000, {"prose": 1.0})])
    before = np.arange(12_345)
    for part in (0, 1):
        assert (replanned.locate(before)[part] == mixture().locate(before)[part]).all()


def test_sources_are_scattered_over_a_block() -> None:
    source, _ = mixture(block=1024).locate(np.arange(4_096))
    eighths = np.array_split(source == 0, 32)
    shares = [part.mean() for part in eighths]
    assert 0.3 < min(shares) < max(shares) < 0.7


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([(100, {"code": 1.0, "pose": 1.0})], "did you mean prose"),
        ([(100, {"code": 1.0, "prose": 0.005})], "raise data.mixture_block to 201 at least"),
        ([(100, {"code": -1.0})], "must be 0 or more"),
        ([(100, {"code": float("nan")})], "must be 0 or more"),
        ([(100, {"code": 0.0})], "no source has a weight above 0"),
        ([(100, {"code": 1.0}), (100, {"prose": 1.0})], "ends before it begins"),
        ([(100, {"short": 1.0})], "shorter than one unit"),
        ([], "at least one phase"),
    ],
)
def test_an_unusable_blend_is_refused_with_the_way_out(phases: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(sources={**SOURCES, "short": 0}, phases=phases)


def test_the_block_that_an_error_proposes_is_enough() -> None:
    phases = [(1_000, {"code": 1.0, "prose": 0.005})]
    assert mixture(phases=phases, block=201).used(201)["prose"] >= 1


@pytest.mark.parametrize("index", [-1, 20_000])
def test_an_index_outside_the_plan_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="outside the plan of 20000 units"):
        mixture().locate(np.array([0, index]))


def test_ten_trillion_tokens_of_forty_sources_cost_little_anywhere() -> None:
    units = 10**13 // 8192
    weights = {f"source{i}": 1.0 + i for i in range(40)}
    sizes = {name: int(1e6 * weight) for name, weight in weights.items()}
    tracemalloc.start()
    began = time.process_time()
    mix = Mixture(sizes, [(units // 2, weights), (units, weights)])
    mix.fingerprint(units)
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    for first in (0, 10**9):
        began = time.process_time()
        source, row = mix.locate(np.arange(first, first + 100_000))
        assert time.process_time() - began < 1
        assert (row < np.array(list(sizes.values()))[source]).all()


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 3_000), seed=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection_for_any_size_and_seed(size: int, seed: int) -> None:
    keys = keyed(seed, np.zeros(size, dtype=np.int64))
    assert (np.sort(permute(np.arange(size), keys, size)) == np.arange(size)).all()


def test_permute_scatters_neighbours() -> None:
    size = 10**7
    keys = keyed(1, np.zeros(20_000, dtype=np.int64))
    images = permute(np.arange(20_000), keys, size)
    counts = np.bincount(images * 50 // size, minlength=50)
    assert np.abs(counts - 400).max() < 100  # five standard deviations
    assert np.abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.03
