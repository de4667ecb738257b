"""Checkpoints: one atomic unit each, found again only when whole.

A checkpoint is a folder `step-<8 digits>` of safetensors files and `state.json`. It is written
beside its place; `MANIFEST.json`, with the size and SHA-256 of every file, comes last; then the
folder is renamed. So a folder of that name with a manifest whose checksums hold is complete, and
everything else is left alone. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and the cause."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps taken or skipped before it: the next step's index."""
        return int(self.state["step"])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors of one of its files (`model`, `optimizer`), on the CPU."""
        try:
            return load_file(self.path / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.path / name}.safetensors cannot be read: {error}"
            ) from error


def save(
    folder: Path, step: int, tensors: Mapping[str, dict[str, Tensor]], state: Mapping[str, Any]
) -> Checkpoint:
    """Write `folder/step-<step>` atomically. Raises `CheckpointError`; what was there stays."""
    final = folder / f"step-{step:08d}"
    partial = folder / f".partial-{final.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".partial-*"):
            shutil.rmtree(leftover)
        partial.mkdir()
        for name, group in tensors.items():
            contiguous = {key: value.detach().contiguous() for key, value in group.items()}
            save_file(contiguous, partial / f"{name}.safetensors")
            _sync(partial / f"{name}.safetensors")
        _write_json(partial / "state.json", {**state, "step": step})
        files = {path.name: _file_record(path) for path in sorted(partial.iterdir())}
        _write_json(partial / "MANIFEST.json", {"format": FORMAT, "files": files})
        if final.exists():  # replayed after a resume; the same content
            shutil.rmtree(final)
        partial.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder} "
            f"({free / 1e9:.2f} GB free): {error}"
        ) from error
    return Checkpoint(final, {**state, "step": step})


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint whose checksums hold, or None."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        if not problems(path):
            return Checkpoint(path, json.loads((path / "state.json").read_text()))
    return None


def problems(path: Path) -> list[str]:
    """Why a checkpoint folder cannot be used; empty where it is complete and intact."""
    try:
        manifest = json.loads((path / "MANIFEST.json").read_text())
    except (OSError, ValueError) as error:
        return [f"{path / 'MANIFEST.json'}: {error}"]
    if manifest.get("format") != FORMAT:
        return [f"{path}: format {manifest.get('format')}, this version reads {FORMAT}"]
    found = []
    for name, record in manifest["files"].items():
        file = path / name
        if Path(name).name != name:
            found.append(f"{file}: a name outside the checkpoint")
        elif not file.is_file():
            found.append(f"{file}: missing")
        elif _file_record(file) != record:
            found.append(f"{file}: size or checksum differs from the manifest")
    return found


def prune(newest: Checkpoint, keep: int) -> None:
    """Remove all but the `keep` checkpoints up to `newest`, which was just written.

    Later ones belong to another past: the run went back behind them since they were damaged.
    """
    others = sorted(newest.path.parent.glob("step-*"))
    position = others.index(newest.path)
    for path in others[: max(position + 1 - keep, 0)] + others[position + 1 :]:
        shutil.rmtree(path)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, a tied one once."""
    return dict(model.named_parameters())


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `model_tensors` gave. Raises `CheckpointError` where names or shapes differ."""
    parameters = model_tensors(model)
    if parameters.keys() != tensors.keys():
        differing = ", ".join(sorted(parameters.keys() ^ tensors.keys()))
        raise CheckpointError(f"the checkpoint is of another model; it differs in {differing}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise CheckpointError(f"{name} has another shape in the checkpoint")
            parameter.copy_(tensors[name])


def _file_record(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
