"""Every planned unit is read exactly once, in order, whatever the ranks, stops and resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import PhaseConfig
from pipeline.data.shards import DataError, Dataset
from pipeline.data.stream import IGNORED
from pipeline.train import feed
from pipeline.train.feed import WrongUnitsError, requests_of
from pipeline.train.loop import Trainer
from pipeline.train.metrics import final_records
from pipeline.train.parallel import Rank
from pipeline.train.schedule import Schedule
from tests.train.tiny import (
    LENGTH,
    configuration,
    corpus,
    same_bits,
    start,
    state_of,
    tensors_of,
    train,
    train_until,
    with_data,
)

STEPS = 8


def schedule_of(global_batch: int, steps: int) -> Schedule:
    """Half of it in rows of 16 tokens, the rest in rows of 4."""
    config = configuration(
        Path(),
        steps,
        tokens=steps * global_batch * LENGTH,
        global_batch=global_batch,
        phases=(PhaseConfig(), PhaseConfig(start="50%", sequence_length=4)),
    )
    return Schedule.of(config.train, ("code", "prose"))


@settings(max_examples=50, deadline=None)
@given(
    global_batch=st.sampled_from([1, 6, 12, 36]),
    attempts=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 7), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
)
def test_any_sequence_of_ranks_micro_batches_stops_and_resumes_reads_each_unit_once_in_order(
    global_batch: int, attempts: list[tuple[int, int, int, int]]
) -> None:
    """An attempt is (ranks, which micro-batch, steps until it dies, steps lost by that)."""
    schedule = schedule_of(global_batch, 64)
    divisors = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
    log: list[list[int]] = []  # the units of each step that was not lost
    for ranks, which, steps, lost in attempts:
        size = divisors[which % len(divisors)]
        for step in range(len(log), len(log) + steps):
            of_step: list[int] = []
            for index in range(ranks):
                for first, count, length in requests_of(schedule, size, Rank(index, ranks), step):
                    assert length == (LENGTH if step < 32 else 4)
                    of_step += range(first, first + count)
            log.append(sorted(of_step))
        log = log[: max(0, len(log) - lost)]
    units = [unit for step in log for unit in step]
    assert units == list(range(len(log) * global_batch))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "tiny")


def test_the_ids_after_a_resume_at_any_step_are_those_of_the_whole_run(
    tmp_path: Path, dataset: Path
) -> None:
    phases = (PhaseConfig(), PhaseConfig(start="50%", sequence_length=4))
    config = configuration(tmp_path, 12, phases=phases)
    trainer = Trainer(config, start(config, "run"), dataset, "cpu")
    whole = [[b.tokens_BT.clone() for b in step] for step in trainer.setup.feed.steps(0, ())]
    assert [len(step[0][0]) for step in whole] == [LENGTH] * 6 + [4] * 6
    for first in range(12):
        found = list(trainer.setup.feed.steps(first, ()))
        assert len(found) == 12 - first
        for batches, expected in zip(found, whole[first:], strict=True):
            assert [b.tokens_BT.tolist() for b in batches] == [e.tolist() for e in expected]


def test_units_other_than_those_due_are_refused(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, STEPS)
    trainer = Trainer(config, start(config, "run"), dataset, "cpu")
    read = trainer.setup.feed.stream.iterate

    def repeated(requests, **settings):  # type: ignore
        for number, batch in enumerate(read(requests, **settings)):
            yield batch if number != 5 else dataclasses.replace(batch, first_unit=8)

    monkeypatch.setattr(trainer.setup.feed.stream, "iterate", repeated)
    with pytest.raises(WrongUnitsError, match="step 2: 2 units from 8 on came where 2 from 10"):
        trainer.fit()


# ---- Damaged shards -----------------------------------------------------------------------------


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def first_step_with(trainer: Trainer, damage: Callable[[Path], None], folder: Path) -> str:
    """Damage a shard whose damaged part is met late enough. Returns its name."""
    for name in sorted(trainer.setup.dataset.shard_names):
        raw = (folder / name).read_bytes()
        damage(folder / name)
        steps = [
            step
            for step, batches in enumerate(trainer.setup.feed.steps(0, ()))
            if any(batch.damaged for batch in batches)
        ]
        if steps and 3 <= steps[0] <= STEPS - 2:
            return name
        (folder / name).write_bytes(raw)
    raise AssertionError("no shard is met late enough")


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, str, int, bytes]:
    """A corpus with a shard that a byte is wrong in, the step that meets it, and what it was."""
    folder = corpus(tmp_path / "damaged")
    sound = {name: (folder / name).read_bytes() for name in Dataset.open(folder).shard_names}
    config = configuration(tmp_path, STEPS)
    trainer = Trainer(config, start(config, "search"), folder, "cpu")
    name = first_step_with(trainer, flip, folder)
    met = [
        step
        for step, batches in enumerate(trainer.setup.feed.steps(0, ()))
        if any(batch.damaged for batch in batches)
    ]
    return folder, name, met[0], sound[name]


def test_a_damaged_shard_stops_the_run_where_it_is_met_with_its_state_saved(
    tmp_path: Path, damaged: tuple[Path, str, int, bytes], dataset: Path
) -> None:
    folder, name, met, sound = damaged
    config = configuration(tmp_path, STEPS, checkpoint_every_tokens=0)
    run = start(config, "run")
    with pytest.raises(DataError, match=f"step {met}: {name}.*saved at this step.*resume"):
        train(config, run, folder)
    assert state_of(run, met)["exclusions"]["damaged"] == []
    (folder / name).write_bytes(sound)
    train(config, run, folder)
    undisturbed = start(config, "undisturbed")
    train(config, undisturbed, dataset)
    assert same_bits(tensors_of(run), tensors_of(undisturbed))


def test_a_skipped_shard_weighs_nothing_from_the_step_that_met_it_also_once_it_is_mended(
    tmp_path: Path, damaged: tuple[Path, str, int, bytes]
) -> None:
    folder, name, met, sound = damaged
    config = with_data(configuration(tmp_path, STEPS), on_corrupt="skip")
    straight, resumed = start(config, "straight"), start(config, "resumed")
    train(config, straight, folder)
    assert state_of(straight, STEPS)["exclusions"]["damaged"] == [[name, met]]
    assert f"step {met}: {name} is damaged and left out" in straight.metrics.read_text()
    train_until(config, resumed, folder, met + 1)
    (folder / name).write_bytes(sound)
    trainer = train(config, resumed, folder)
    assert same_bits(tensors_of(straight), tensors_of(resumed))
    assert trainer.progress.exclusions.damaged == ((name, met),)
    blocked = trainer.progress.exclusions.blocked(met)
    for batches in trainer.setup.feed.steps(met, ()):
        for batch in batches:
            silent = (
                trainer.setup.feed.stream.without_shards(batch, blocked).labels_BT == IGNORED
            ).all(1)
            _, rows = trainer.setup.mixture.locate(
                np.arange(batch.first_unit, batch.first_unit + 2)
            )
            for unit, row in enumerate(rows.tolist()):
                source = trainer.setup.mixture.names[batch.source_B[unit]]
                touched = trainer.setup.dataset.shards_of_unit(source, row, LENGTH)
                assert bool(silent[unit]) == (name in touched)


def test_a_shard_that_is_missing_or_short_is_named_before_the_first_step(
    tmp_path: Path, damaged: tuple[Path, str, int, bytes]
) -> None:
    folder, name, _, sound = damaged
    config = configuration(tmp_path, STEPS)
    (folder / name).write_bytes(sound[:-2])
    with pytest.raises(DataError, match=f"{name}: has"):
        Trainer(config, start(config, "short"), folder, "cpu")
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        Trainer(config, start(config, "missing"), folder, "cpu")
    skipping = with_data(config, on_corrupt="skip")
    run = start(skipping, "skipping")
    train(skipping, run, folder)
    assert [entry[0] for entry in state_of(run, STEPS)["exclusions"]["damaged"]] == [name]


def test_all_ranks_leave_out_what_one_of_them_met(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, STEPS)
    trainer = Trainer(config, start(config, "run"), dataset, "cpu")
    batches = next(trainer.setup.feed.steps(0, ()))
    assert trainer.setup.feed.damaged(batches) == frozenset()
    monkeypatch.setattr(feed, "all_reduce", lambda met: met.add_(1))
    monkeypatch.setattr(feed, "gathered", lambda own: [own, frozenset({"prose-00001.tokens"})])
    assert trainer.setup.feed.damaged(batches) == {"prose-00001.tokens"}


def test_what_each_step_waited_for_data_is_logged(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, 3)
    run = start(config, "run")
    train(config, run, dataset)
    steps = [r["metrics"] for r in final_records(run.metrics) if r["kind"] == "train"]
    waits = [step["train/seconds_waiting_for_data"] for step in steps]
    assert len(waits) == 3
    assert min(waits) > 0
