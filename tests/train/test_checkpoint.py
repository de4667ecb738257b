"""Checkpoints are whole or not there, and load on any number of ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import HybridModel
from pipeline.train import checkpoint
from tests.train.test_optim import SHAPE


def save(folder: Path, step: int, value: float = 0.0) -> checkpoint.Checkpoint:
    tensors = {"model": {"w": torch.full((3,), value)}, "optimizer": {"w/step": torch.tensor(1.0)}}
    return checkpoint.save(folder, step, tensors, {"note": "x"})


def save_sharded(folder: Path, step: int, tensors: dict[str, torch.Tensor], ranks: int) -> Path:
    partial = checkpoint.partial_folder(folder, step, "attempt")
    for rank in range(ranks):
        pieces = checkpoint.pieces_of({"model": tensors}, rank, ranks)
        checkpoint.write_part(partial, pieces, rank, ranks)
    return checkpoint.commit(partial, step, ranks, {}).path


def model_file(path: Path) -> Path:
    return path / "model-00000-of-00001.safetensors"


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 7, value=0.1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, found.state["note"]) == (7, "x")
    assert torch.equal(found.tensors("model")["w"], torch.full((3,), 0.1))
    assert torch.equal(found.tensors("optimizer")["w/step"], torch.tensor(1.0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_several_ranks_wrote_loads_whole_on_one(tmp_path: Path, ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "one": (1,), "vector": (4,), "matrix": (7, 3)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["half"] = torch.randn(9, 2, generator=generator).bfloat16()
    save_sharded(tmp_path, 1, tensors, ranks)
    found = checkpoint.at_step(tmp_path, 1).tensors("model")
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name]), name


def test_each_rank_writes_its_share_and_no_more(tmp_path: Path) -> None:
    path = save_sharded(tmp_path, 1, {"w": torch.randn(64, 64)}, 4)
    rows = [len(load_file(file)["w"]) for file in sorted(path.glob("*.safetensors"))]
    assert rows == [16, 16, 16, 16]


def test_missing_rows_are_named(tmp_path: Path) -> None:
    path = save_sharded(tmp_path, 1, {"w": torch.randn(6, 2)}, 2)
    (path / "model-00001-of-00002.safetensors").unlink()
    whole = checkpoint.Checkpoint(path, {})
    with pytest.raises(checkpoint.CheckpointError, match="rows of w are not all there"):
        whole.tensors("model")


def test_latest_is_the_newest_whose_checksums_hold(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = model_file(save(tmp_path, 20).path)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize(
    "damage", ["truncate", "remove", "no_manifest", "other_format", "state", "extra", "symlink"]
)
def test_a_damaged_checkpoint_is_named_and_not_used(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path / "run", 3).path
    file = path / "optimizer-00000-of-00001.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "no_manifest":
        (path / "MANIFEST.json").unlink()
    elif damage == "other_format":
        manifest = json.loads((path / "MANIFEST.json").read_text())
        (path / "MANIFEST.json").write_text(json.dumps({**manifest, "format": 99}))
    elif damage == "state":
        (path / "state.json").write_text("{}")
    elif damage == "extra":
        save_file({"w": torch.ones(3)}, path / "model-00001-of-00002.safetensors")
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    assert str(path) in checkpoint.problems(path)[0]
    assert checkpoint.latest(tmp_path / "run") is None
    with pytest.raises(checkpoint.CheckpointError, match="step-00000003"):
        checkpoint.at_step(tmp_path / "run", 3)


@pytest.mark.parametrize("manifest", ["[]", "null", '{"format": 2}', '{"format": 2, "files": 3}'])
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, manifest: str) -> None:
    path = save(tmp_path, 3).path
    (path / "MANIFEST.json").write_text(manifest)
    assert "MANIFEST.json" in checkpoint.problems(path)[0]


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    path = save(tmp_path, 3).path
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"]["../outside"] = {"bytes": 0, "sha256": ""}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "outside the checkpoint" in checkpoint.problems(path)[0]


class Hostile:
    """Unpickled, it would leave a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.proof,)


def test_a_pickle_in_place_of_tensors_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    path, proof = save(tmp_path / "run", 3).path, tmp_path / "proof"
    file = model_file(path)
    file.write_bytes(pickle.dumps(Hostile(proof)))
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"][file.name] = checkpoint._record(file)  # an attacker can do as much
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    found = checkpoint.latest(tmp_path / "run")
    assert found is not None
    with pytest.raises(checkpoint.CheckpointError, match=file.name):
        found.tensors("model")
    assert not proof.exists()


@pytest.mark.parametrize("failing_call", range(6))
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

    for name in ("save_file", "_write_json", "_synced_record"):
        monkeypatch.setattr(checkpoint, name, fail_at(getattr(checkpoint, name)))
    with pytest.raises(checkpoint.CheckpointError, match=r"GB free.*No space left"):
        save(tmp_path, 2)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def test_a_partial_folder_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    partial = save(tmp_path, 5).path.rename(tmp_path / ".partial-step-00000005-1")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.take_over(tmp_path, "next")
    assert not partial.exists()


def test_parts_of_an_earlier_start_never_enter_a_checkpoint(tmp_path: Path) -> None:
    stale = checkpoint.partial_folder(tmp_path, 1, "earlier")
    pieces = checkpoint.pieces_of({"model": {"w": torch.zeros(4)}}, 1, 2)
    checkpoint.write_part(stale, pieces, 1, 2)
    path = save_sharded(tmp_path, 1, {"w": torch.ones(4)}, 2)
    assert torch.equal(checkpoint.at_step(tmp_path, 1).tensors("model")["w"], torch.ones(4))
    assert path.is_dir()


def test_prune_keeps_the_newest_and_what_is_always_kept(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in (1, 2, 4, 10, 30)]
    checkpoint.prune(saved[-1], keep=2, always=lambda step: step == 2)
    assert checkpoint.steps_in(tmp_path) == [2, 10, 30]


def test_other_folders_beside_checkpoints_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for name in ("step-00000005-copy", "step-7", "step-old"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps_in(tmp_path) == [3]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    checkpoint.prune(save(tmp_path, 4), keep=1)
    assert len(list(tmp_path.glob("step-*"))) == 4


def test_prune_never_takes_a_damaged_later_one_for_the_newest(tmp_path: Path) -> None:
    model_file(save(tmp_path, 9).path).write_bytes(b"")
    saved = save(tmp_path, 5)
    checkpoint.prune(saved, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 5


def test_an_unknown_step_is_answered_with_those_there_are(tmp_path: Path) -> None:
    save(tmp_path, 4), save(tmp_path, 8)
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint of step 5.*4, 8"):
        checkpoint.at_step(tmp_path, 5)


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model = HybridModel(dataclasses.replace(SHAPE, tie_embeddings=True), seed=1)
    checkpoint.save(tmp_path, 1, {"model": checkpoint.model_tensors(model)}, {})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    other = HybridModel(dataclasses.replace(SHAPE, tie_embeddings=True), seed=2)
    checkpoint.load_model_tensors(other, found.tensors("model"))
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    tensors = checkpoint.model_tensors(HybridModel(SHAPE))
    tensors.pop("head.weight")
    with pytest.raises(checkpoint.CheckpointError, match=r"differs in head\.weight"):
        checkpoint.load_model_tensors(HybridModel(SHAPE), tensors)


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t[:-1]])
def test_a_tensor_of_another_type_or_shape_is_refused_by_name(change) -> None:  # type: ignore[no-untyped-def]
    tensors = checkpoint.model_tensors(HybridModel(SHAPE))
    tensors["head.weight"] = change(tensors["head.weight"].detach())
    with pytest.raises(checkpoint.CheckpointError, match=r"head\.weight is"):
        checkpoint.load_model_tensors(HybridModel(SHAPE), tensors)
