"""`data.skip` and `data.block`: nothing else moves, and what is done cannot be changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import ConfigError, DataConfig, SourceConfig, TokenizerConfig
from pipeline.data.shards import Dataset
from pipeline.data.stream import IGNORED
from pipeline.lineage import schedule_of
from pipeline.stages import describe_training
from pipeline.train.exclusions import Exclusions, check
from pipeline.train.loop import Trainer
from tests.train.tiny import (
    GLOBAL_BATCH,
    configuration,
    corpus,
    curve_of,
    same_bits,
    start,
    state_of,
    tensors_of,
    train,
    train_until,
    with_data,
)

STEPS = 8


def data(**changes: object) -> DataConfig:
    return DataConfig("d", {"code": SourceConfig("python")}, TokenizerConfig(), **changes)  # type: ignore


def test_blocks_hold_from_their_step_on_until_the_next_entry() -> None:
    past = Exclusions(blocks=((3, ("a",)), (7, ())))
    assert [sorted(past.blocked(step)) for step in (2, 3, 6, 7)] == [[], ["a"], ["a"], []]


def test_a_list_of_shards_counts_from_the_step_at_which_the_run_goes_on() -> None:
    first = Exclusions().resumed(data(block=("a",)), 0)
    assert first.blocks == ((0, ("a",)),)
    assert first.resumed(data(block=("a",)), 5) == first
    more = first.resumed(data(block=("b", "a")), 5)
    assert more.blocks == ((0, ("a",)), (5, ("a", "b")))
    assert more.resumed(data(), 9).blocks[-1] == (9, ())


def test_replayed_steps_are_not_blocked_before_and_after() -> None:
    once = Exclusions().resumed(data(block=("a",)), 6)
    assert once.resumed(data(block=("b",)), 6).blocks == ((6, ("b",)),)


def test_a_step_that_is_done_can_be_neither_left_out_nor_taken_back() -> None:
    with pytest.raises(ConfigError, match=r"step 2 is done.*cannot be left out any more.*fork"):
        Exclusions().resumed(data(skip=(2, 9)), 5)
    with pytest.raises(ConfigError, match=r"step 2 is done.*cannot be taken back"):
        Exclusions(skip=(2,)).resumed(data(), 5)
    assert Exclusions(skip=(2, 7)).resumed(data(skip=(2, 9)), 5).skip == (2, 9)


def test_a_child_takes_its_parent_s_past_whatever_its_own_list_says() -> None:
    parents = Exclusions(skip=(2,), blocks=((1, ("a",)),))
    born = parents.resumed(data(skip=(3, 7)), 5, fork_step=5)
    assert born == Exclusions((2, 7), ((1, ("a",)), (5, ())))
    assert born.resumed(data(skip=(3, 7)), 8, fork_step=5) == born
    with pytest.raises(ConfigError, match="step 6 is done"):
        born.resumed(data(skip=(6, 7)), 8, fork_step=5)


def test_what_a_checkpoint_holds_is_what_it_was_given() -> None:
    held = Exclusions((1, 4), ((0, ("x",)), (4, ())))
    assert Exclusions.from_dict(held.to_dict()) == held


def test_unknown_shards_and_steps_are_refused_by_name() -> None:
    check(data(skip=(0, 9), block=("code-00001.tokens",)), {"code-00001.tokens"}, 10)
    with pytest.raises(ConfigError, match=r"code-1\.tokens.*did you mean code-00001\.tokens"):
        check(data(block=("code-1.tokens",)), {"code-00001.tokens"}, 10)
    with pytest.raises(ConfigError, match="no step 10; the run's are 0 to 9"):
        check(data(skip=(10,)), set(), 10)


# ---- Whole runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "tiny")


class Recorder:
    """Notes, step by step, the batches that a trainer is given and the weights after the step."""

    def __init__(self, trainer: Trainer) -> None:
        self.labels: dict[int, torch.Tensor] = {}
        self.tokens: dict[int, torch.Tensor] = {}
        self.keys: list[int] = []
        on_device, begin = trainer._on_device, trainer.setup.trainable.precision.begin

        def noted(batch: object) -> object:
            moved = on_device(batch)  # type: ignore
            for name, value in (("labels", moved.labels_BT), ("tokens", moved.tokens_BT)):
                former = getattr(self, name).get(trainer.progress.step)
                whole = value if former is None else torch.cat([former, value])
                getattr(self, name)[trainer.progress.step] = whole
            return moved

        def begun(step: int, micro_batch: int) -> None:
            self.keys.append(step)
            begin(step, micro_batch)

        trainer._on_device = noted  # type: ignore
        trainer.setup.trainable.precision.begin = begun  # type: ignore


def test_a_skipped_step_changes_no_weight_and_moves_no_later_one(
    tmp_path: Path, dataset: Path
) -> None:
    plain = configuration(tmp_path, STEPS)
    left_out = with_data(plain, skip=(4,))
    runs, seen = [], []
    for name, config in (("plain", plain), ("left-out", left_out)):
        run = start(config, name)
        trainer = Trainer(config, run, dataset, "cpu")
        seen.append(Recorder(trainer))
        trainer.fit()
        runs.append(run)
    assert same_bits(tensors_of(runs[0], 4), tensors_of(runs[1], 4))
    assert sorted(seen[1].tokens) == [0, 1, 2, 3, 5, 6, 7]
    for step in seen[1].tokens:
        assert seen[1].tokens[step].equal(seen[0].tokens[step])
    assert sorted(set(seen[1].keys)) == [0, 1, 2, 3, 5, 6, 7]
    assert not same_bits(tensors_of(runs[0]), tensors_of(runs[1]))
    assert 5 not in [step for kind, step, _ in curve_of(runs[1]) if kind == "train"]
    assert "step 4: left out" in runs[1].metrics.read_text()


def test_the_weights_before_and_after_a_skipped_step_are_the_same(
    tmp_path: Path, dataset: Path
) -> None:
    config = with_data(
        configuration(tmp_path, 5, checkpoint_every_tokens=64), skip=(3,)
    )  # a checkpoint after every step
    run = start(config, "run")
    train(config, run, dataset)
    assert same_bits(tensors_of(run, 3), tensors_of(run, 4))
    assert not same_bits(tensors_of(run, 4), tensors_of(run, 5))


def test_skips_given_on_resume_hold_and_survive_another_resume(
    tmp_path: Path, dataset: Path
) -> None:
    plain = configuration(tmp_path, STEPS)
    skipping = with_data(plain, skip=(5,))
    runs = []
    for name, first in (("given-late", plain), ("given-at-once", skipping)):
        run = start(first, name)
        train_until(first, run, dataset, 3)
        train_until(skipping, run, dataset, 7)
        train(skipping, run, dataset)
        assert state_of(run, 8)["exclusions"]["skip"] == [5]
        runs.append(run)
    assert same_bits(tensors_of(runs[0]), tensors_of(runs[1]))


def test_a_skip_of_a_past_step_is_refused_on_resume(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, STEPS)
    run = start(config, "run")
    train_until(config, run, dataset, 5)
    with pytest.raises(ConfigError, match=r"data\.skip: step 2 is done"):
        train(with_data(config, skip=(2,)), run, dataset)


def test_a_child_of_a_run_that_skipped_can_be_resumed(tmp_path: Path, dataset: Path) -> None:
    first = with_data(configuration(tmp_path, 4), skip=(1,))
    train(first, start(first, "parent"), dataset)
    config = configuration(tmp_path, STEPS, fork_from="parent@4")
    child = start(config, "child")
    train_until(config, child, dataset, 6)
    train(config, child, dataset)
    assert state_of(child, 8)["exclusions"]["skip"] == [1]


def test_a_blocked_shard_weighs_nothing_from_the_resume_on(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, STEPS)
    run = start(config, "run")
    train_until(config, run, dataset, 3)
    shards = Dataset.open(dataset)
    blocked = frozenset(sorted(shards.shard_names)[::2])
    changed = with_data(config, block=tuple(blocked))
    trainer = Trainer(changed, run, dataset, "cpu")
    seen = Recorder(trainer)
    trainer.fit()
    lost = 0
    for step in range(3, STEPS):
        units = np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        sources, rows = trainer.setup.mixture.locate(units)
        for unit, (source, row) in enumerate(zip(sources.tolist(), rows.tolist(), strict=True)):
            name = trainer.setup.mixture.names[source]
            touched = shards.shards_of_unit(name, row, trainer.setup.schedule.unit_length)
            nothing = bool((seen.labels[step][unit] == IGNORED).all())
            assert nothing == (not blocked.isdisjoint(touched))
            lost += nothing
    assert 0 < lost < GLOBAL_BATCH * (STEPS - 3)
    assert state_of(run, STEPS)["exclusions"]["block"] == [[3, sorted(blocked)]]
    assert state_of(run, 3)["exclusions"]["block"] == []


def test_what_does_not_exist_is_refused_before_training(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, STEPS)
    opened, schedule = Dataset.open(dataset), schedule_of(config, None)
    describe_training(with_data(config, skip=(1,)), opened, schedule)
    for change in ({"skip": (STEPS,)}, {"block": ("prose-99999.tokens",)}):
        with pytest.raises(ConfigError, match=f"data.{next(iter(change))}"):
            describe_training(with_data(config, **change), opened, schedule)
