"""What the loop does when something goes wrong, or when it is asked to stop."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import ConfigError
from pipeline.runs import RunFolder
from pipeline.train import checkpoint, loop, stopping
from pipeline.train.checkpoint import CheckpointError
from pipeline.train.guards import TooManySkippedStepsError
from pipeline.train.loop import Trainer
from pipeline.train.metrics import read_records
from pipeline.train.step import StepResult
from tests.train.tiny import configuration, corpus, curve_of, same_bits, start, tensors_of, train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def notes(run: RunFolder) -> list[str]:
    return [record["note"] for record, _ in read_records(run.metrics) if "note" in record]


def state(run: RunFolder) -> dict[str, Any]:
    found = checkpoint.latest(run.checkpoints)
    assert found is not None
    return dict(found.state)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Any) -> None:
    """Run `action` in the middle of that step, once its gradients are there."""
    real = loop.train_step

    def train_step(*arguments: Any, **named: Any) -> StepResult:
        if named["step"] == step:
            action(named)
        return real(*arguments, **named)

    monkeypatch.setattr(loop, "train_step", train_step)


def test_a_spike_is_skipped_noted_and_counted(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spike(named: dict[str, Any]) -> None:
        named["judge"] = lambda loss, grad_norm: "loss too high"

    at_step(monkeypatch, 3, spike)
    config = configuration(tmp_path, 6)
    run = start(config, "run")
    summary = Trainer(config, run, dataset, "cpu").fit()
    assert summary["skipped_steps"] == 1
    assert notes(run) == ["step 3: skipped, loss too high"]
    window = state(run)["window"]
    assert len(window) == 6  # finite, so the skipped step is in it
    assert all(math.isfinite(value) for pair in window for value in pair)


def test_the_window_goes_on_after_a_resume_as_if_nothing_had_been(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, 6)
    whole, cut = start(config, "whole"), start(config, "cut")
    train(config, whole, dataset)
    with monkeypatch.context() as patched:
        at_step(patched, 5, lambda named: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            train(config, cut, dataset)
    train(config, cut, dataset)
    assert state(cut)["window"] == state(whole)["window"]
    assert same_bits(tensors_of(cut), tensors_of(whole))
    assert curve_of(cut) == curve_of(whole)


def test_too_many_skipped_steps_end_with_all_that_helps_to_find_out_why(
    tmp_path: Path, dataset: Path
) -> None:
    diverging = {"learning_rate": 1e30, "clip_norm": 1e30, "checkpoint_every_tokens": 0}
    config = configuration(tmp_path, 6, max_skipped_steps=1, **diverging)
    run = start(config, "run")
    with pytest.raises(TooManySkippedStepsError) as raised:
        train(config, run, dataset)
    message = str(raised.value)
    for expected in ("2 steps were skipped", "loss nan", "Phase 1 of 1", "rows of code"):
        assert expected in message
    assert "non-finite" in message.split("rows of")[-1]
    assert "data at run=run step=" in message


@pytest.mark.parametrize(("failing", "survives"), [(2, True), (3, False)])
def test_training_outlives_failed_saves_up_to_the_configured_number(
    tmp_path: Path,
    dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    survives: bool,
) -> None:
    real, calls = checkpoint.write_part, 0

    def write_part(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if 1 < calls <= 1 + failing:
            raise CheckpointError(f"0.00 GB free: [Errno {errno.ENOSPC}] No space left on device")
        real(*arguments)

    monkeypatch.setattr(checkpoint, "write_part", write_part)
    config = configuration(tmp_path, 12, max_checkpoint_failures=3)
    run = start(config, "run")
    if survives:
        train(config, run, dataset)
        assert checkpoint.steps_in(run.checkpoints)[-1] == 12
        assert len([note for note in notes(run) if "No space left" in note]) == failing
        return
    with pytest.raises(CheckpointError, match="3 checkpoints in a row could not be written"):
        train(config, run, dataset)
    found = checkpoint.latest(run.checkpoints)
    assert found is not None
    assert found.step == 2


def damage(run: RunFolder, steps: list[int]) -> None:
    for step in steps:
        file = next((run.checkpoints / f"step-{step:08d}").glob("model-*.safetensors"))
        damaged = file.read_bytes()[:-4]
        file.unlink()  # tensors that were read from it still stand on its bytes
        file.write_bytes(damaged)


def test_damaged_checkpoints_are_passed_over_with_a_note(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, 6)
    run = start(config, "run")
    train(config, run, dataset)
    before = tensors_of(run)
    damage(run, [6])
    train(config, run, dataset)
    (note,) = notes(run)
    assert note.startswith("on from step 4; newer ones are damaged:")
    assert "step-00000006/model-" in note
    assert same_bits(tensors_of(run), before)


def test_where_no_checkpoint_can_be_used_nothing_is_begun_again(
    tmp_path: Path, dataset: Path
) -> None:
    config = configuration(tmp_path, 6, keep_checkpoints=1)
    run = start(config, "run")
    train(config, run, dataset)
    steps = checkpoint.steps_in(run.checkpoints)
    damage(run, steps)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* size or checksum .* move them"):
        train(config, run, dataset)
    assert checkpoint.steps_in(run.checkpoints) == steps


def test_the_last_step_is_logged_whatever_the_interval(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, 6, log_every_steps=100)
    run = start(config, "run")
    train(config, run, dataset)
    assert [step for kind, step, _ in curve_of(run) if kind == "train"] == [6]


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("no space left")

    monkeypatch.setattr(checkpoint, "write_part", full)
    config = configuration(tmp_path, 2)
    run = start(config, "run")
    with pytest.raises(CheckpointError, match="make room and resume"):
        train(config, run, dataset)


def test_a_request_to_stop_ends_after_the_step_with_a_checkpoint_of_it(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, 8)
    run = start(config, "run")
    with monkeypatch.context() as patched:
        at_step(patched, 4, lambda named: run.stop.touch())
        summary = Trainer(config, run, dataset, "cpu").fit()
    # Ranks agree on the request before a step; one that comes in a step counts from the next on.
    assert summary["stopped"]
    assert summary["steps"] == 6
    run.stop.unlink()
    assert checkpoint.steps_in(run.checkpoints)[-1] == 6
    train(config, run, dataset)
    whole = start(config, "whole")
    train(config, whole, dataset)
    assert same_bits(tensors_of(run), tensors_of(whole))


def test_notice_of_a_preemption_saves_and_goes_on(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "PREEMPTION_SECONDS", 0.0)
    asked: list[bool] = []

    def preempted() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    config = configuration(tmp_path, 6, checkpoint_every_tokens=0, keep_checkpoints=9)
    run = start(config, "run")
    assert not Trainer(config, run, dataset, "cpu", preempted).fit()["stopped"]
    assert len(asked) == 6
    assert checkpoint.steps_in(run.checkpoints) == [3, 6]


def test_another_recipe_is_refused_with_the_difference_shown(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, 4)
    run = start(config, "run")
    train(config, run, dataset)
    precision = dataclasses.replace(config.precision, recipe="mxfp4")
    with pytest.raises(ConfigError, match=r"precision\.recipe \('.*' then, 'mxfp4' now\)"):
        train(dataclasses.replace(config, precision=precision), run, dataset)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"keep_checkpoints": 2}, [8, 10]),
        ({"keep_checkpoints": 1, "keep_checkpoints_every_tokens": 4 * 64}, [4, 8, 10]),
    ],
)
def test_retention(tmp_path: Path, dataset: Path, change: dict[str, int], kept: list[int]) -> None:
    config = configuration(tmp_path, 10, **change)
    run = start(config, "run")
    train(config, run, dataset)
    assert checkpoint.steps_in(run.checkpoints) == kept


def test_a_checkpoint_holds_what_it_should(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, 2)
    run = start(config, "run")
    (run.path / "tracking.json").write_text(json.dumps({"run_id": "abc"}))
    train(config, run, dataset)
    held = state(run)
    assert held["mlflow_run_id"] == "abc"
    assert held["config"] == config.to_dict()
    assert {"identity", "skipped_steps", "window", "exclusions", "lineage"} <= held.keys()
