"""Checkpoints are written behind training's back, and what fails is told once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from pipeline.train import checkpoint, saver
from pipeline.train.checkpoint import Checkpoint, CheckpointError
from pipeline.train.parallel import Rank
from pipeline.train.saver import Saver


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes wait until the event is set."""
    ready, write = threading.Event(), checkpoint.write_part

    def wait_and_write(*arguments: object) -> None:
        assert ready.wait(20)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saver.checkpoint, "write_part", wait_and_write)
    return ready


def make(folder: Path, done: list[Checkpoint], rank: Rank | None = None) -> Saver:
    return Saver(folder, rank or Rank(), "attempt", done.append)


def test_a_save_returns_before_the_disk_has_it(tmp_path: Path, slow_disk: threading.Event) -> None:
    done: list[Checkpoint] = []
    writer = make(tmp_path, done)
    writer.save(3, {"model": {"w": torch.ones(4)}}, {})
    assert checkpoint.latest(tmp_path) is None
    slow_disk.set()
    assert writer.settle() == ""
    assert [item.step for item in done] == [3]


def test_what_training_changes_afterwards_is_not_saved(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    weights = torch.ones(4)
    writer = make(tmp_path, [])
    writer.save(3, {"model": {"w": weights}}, {})
    weights.zero_()
    slow_disk.set()
    writer.settle()
    assert torch.equal(checkpoint.at_step(tmp_path, 3).tensors("model")["w"], torch.ones(4))


def test_buffers_are_reused_and_hold_the_latest(tmp_path: Path) -> None:
    writer = make(tmp_path, [])
    for step in (1, 2):
        writer.save(step, {"model": {"w": torch.full((4,), float(step))}}, {})
        assert writer.settle() == ""
    for step in (1, 2):
        found = checkpoint.at_step(tmp_path, step).tensors("model")["w"]
        assert torch.equal(found, torch.full((4,), float(step)))


def test_a_failed_save_is_told_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    done: list[Checkpoint] = []
    writer = make(tmp_path, done)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        writer.save(1, {"model": {"w": torch.ones(4)}}, {})
        error = writer.settle()
    assert "No space left" in error
    assert "GB free" in error
    assert "No space left" in capsys.readouterr().err
    assert writer.settle() == ""
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.OWNER]
    writer.save(2, {"model": {"w": torch.ones(4)}}, {})
    assert writer.settle() == ""
    assert [item.step for item in done] == [2]


def test_rank_0_waits_for_the_parts_of_all_ranks(tmp_path: Path) -> None:
    tensors = {"model": {"w": torch.arange(4.0)}}
    first, second = make(tmp_path, [], Rank(0, 2)), make(tmp_path, [], Rank(1, 2))
    first.save(1, tensors, {})
    assert first._thread is not None
    first._thread.join(0.3)
    assert first._thread.is_alive()
    assert checkpoint.latest(tmp_path) is None
    second.save(1, tensors, {})
    assert second.settle() == first.settle() == ""
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert torch.equal(found.tensors("model")["w"], torch.arange(4.0))


def test_rank_0_gives_up_when_another_rank_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make(tmp_path, [], Rank(0, 2))
    first.save(1, {"model": {"w": torch.arange(4.0)}}, {})
    monkeypatch.setattr(saver, "gathered", lambda own: [own, "rank 1 has no space left"])
    assert first.settle() == "rank 1 has no space left"
    assert "another rank could not write its part" in capsys.readouterr().err
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("error", [ValueError("not JSON"), MemoryError()])
def test_no_kind_of_failure_passes_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    writer = make(tmp_path, [])
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "commit", fail)
        writer.save(1, {"model": {"w": torch.ones(4)}}, {})
        assert type(error).__name__ in writer.settle()
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.OWNER]


def test_a_part_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    sync = checkpoint._sync

    def look(path: Path) -> None:
        if ".part-" in path.name:
            seen.append(checkpoint.part_record(path.parent, 0).exists())
        sync(path)

    monkeypatch.setattr(checkpoint, "_sync", look)
    checkpoint.write_part(checkpoint.partial_folder(tmp_path, 1, "attempt"), {}, 0, 1)
    assert seen == [False]
    assert checkpoint.part_record(checkpoint.partial_folder(tmp_path, 1, "attempt"), 0).exists()


def test_what_fails_after_a_checkpoint_stands_is_no_failed_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prune(_: Checkpoint) -> None:
        raise OSError("old ones cannot be removed")

    writer = Saver(tmp_path, Rank(), "attempt", prune)
    writer.save(1, {"model": {"w": torch.ones(4)}}, {})
    assert writer.settle() == ""
    assert checkpoint.latest(tmp_path) is not None
    assert "old ones cannot be removed" in capsys.readouterr().err


def test_a_start_removes_what_the_start_before_left_half_written(tmp_path: Path) -> None:
    partial = checkpoint.partial_folder(tmp_path, 5, "earlier")
    checkpoint.write_part(partial, {}, 0, 2)
    make(tmp_path, [])
    assert not partial.exists()


def test_a_process_cut_off_from_its_run_completes_no_checkpoint(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    orphan = make(tmp_path, [])
    orphan.save(5, {"model": {"w": torch.ones(4)}}, {})
    Saver(tmp_path, Rank(), "a later start", lambda saved: None)
    slow_disk.set()
    assert "another process has taken over" in orphan.settle()
    assert checkpoint.latest(tmp_path) is None


def test_lost_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    writer = make(tmp_path / "checkpoints", [])
    writer.save(1, {"model": {"w": torch.ones(4)}}, {})
    assert str(tmp_path / "checkpoints") in writer.settle()
    with pytest.raises(CheckpointError):
        checkpoint.at_step(tmp_path / "checkpoints", 1)
