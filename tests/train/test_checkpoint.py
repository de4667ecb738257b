"""Checkpoints are whole or not there."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest
import torch

from model import HybridModel
from pipeline.train import checkpoint
from tests.train.test_optim import SHAPE


def save(folder: Path, step: int, value: float = 0.0) -> checkpoint.Checkpoint:
    tensors = {"model": {"w": torch.full((3,), value)}, "optimizer": {"w/step": torch.tensor(1.0)}}
    return checkpoint.save(folder, step, tensors, {"note": "x"})


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 7, value=0.1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, found.state["note"]) == (7, "x")
    assert torch.equal(found.tensors("model")["w"], torch.full((3,), 0.1))


def test_latest_is_the_newest_whose_checksums_hold(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 20).path / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "no_manifest", "other_format"])
def test_a_damaged_checkpoint_is_named_and_not_used(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path, 3).path
    file = path / "optimizer.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "no_manifest":
        (path / "MANIFEST.json").unlink()
    else:
        manifest = json.loads((path / "MANIFEST.json").read_text())
        (path / "MANIFEST.json").write_text(json.dumps({**manifest, "format": 99}))
    assert str(path) in checkpoint.problems(path)[0]
    assert checkpoint.latest(tmp_path) is None


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    path = save(tmp_path, 3).path
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"]["../outside"] = {"bytes": 0, "sha256": ""}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "outside the checkpoint" in checkpoint.problems(path)[0]


@pytest.mark.parametrize("failing_call", range(4))
def test_a_full_disk_at_any_write_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    save(tmp_path, 1)
    calls = 0

    def fail_at(original):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls - 1 == failing_call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(checkpoint, "save_file", fail_at(checkpoint.save_file))
    monkeypatch.setattr(checkpoint, "_write_json", fail_at(checkpoint._write_json))
    with pytest.raises(checkpoint.CheckpointError, match=r"GB free.*No space left"):
        save(tmp_path, 2)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def test_a_partial_folder_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    partial = save(tmp_path, 5).path.rename(tmp_path / ".partial-step-00000005-1")
    assert partial.is_dir()
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 6)
    assert not partial.exists()


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in (1, 2, 4, 30)]
    checkpoint.prune(saved[-1], keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000030"]


def test_prune_never_takes_a_damaged_later_one_for_the_newest(tmp_path: Path) -> None:
    damaged = save(tmp_path, 9).path / "model.safetensors"
    damaged.write_bytes(b"")
    saved = save(tmp_path, 5)
    checkpoint.prune(saved, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 5


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model = HybridModel(dataclasses.replace(SHAPE, tie_embeddings=True), seed=1)
    checkpoint.save(tmp_path, 1, {"model": checkpoint.model_tensors(model)}, {})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    other = HybridModel(dataclasses.replace(SHAPE, tie_embeddings=True), seed=2)
    checkpoint.load_model_tensors(other, found.tensors("model"))
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    tensors = checkpoint.model_tensors(HybridModel(SHAPE))
    tensors.pop("head.weight")
    with pytest.raises(checkpoint.CheckpointError, match=r"differs in head\.weight"):
        checkpoint.load_model_tensors(HybridModel(SHAPE), tensors)
