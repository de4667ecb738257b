"""Checkpoints: one atomic unit each, sharded over ranks, found again only when whole.

    step-00000120/
      model-00000-of-00002.safetensors       rank 0's rows of every parameter
      model-00001-of-00002.safetensors       rank 1's
      optimizer-00000-of-00002.safetensors   ...
      state.json                             everything that is no tensor
      MANIFEST.json                          size and SHA-256 of each file above: written last

It grows under another name, `.partial-...`, to which every rank writes its part; rank 0 adds the
manifest when all parts are there and renames the folder. So a folder `step-...` whose manifest's
checksums hold is complete, and everything else is left alone. A file's metadata says which rows it
holds of each tensor: a checkpoint loads on any number of ranks. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.train.parallel import local, rows_of

FORMAT = 2
MANIFEST, STATE, OWNER = "MANIFEST.json", "state.json", ".owner"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and the cause."""


@dataclass(frozen=True)
class Piece:
    """The rows of a tensor that one rank holds; of a scalar, all of it."""

    rows: Tensor
    start: int  # first row
    total: int  # rows of the whole tensor; 0 for a scalar


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps taken or skipped before it: the next step's index."""
        return int(self.state["step"])

    def tensors(self, group: str, rows: Mapping[str, slice] | None = None) -> dict[str, Tensor]:
        """All tensors of a group (`model`, `optimizer`), whole, on the CPU.

        rows: of these tensors only these rows are read.

        Raises `CheckpointError` that names the file where one cannot be read, or the tensor whose
        rows are not all there.
        """
        pieces: dict[str, list[Piece]] = {}
        for file in sorted(self.path.glob(f"{group}-*-of-*.safetensors")):
            for name, piece in _read_pieces(file, rows or {}):
                pieces.setdefault(name, []).append(piece)
        if not pieces:
            raise CheckpointError(f"{self.path} holds no {group}-*.safetensors")
        return {
            name: self._joined(name, parts, (rows or {}).get(name))
            for name, parts in pieces.items()
        }

    def _joined(self, name: str, parts: list[Piece], rows: slice | None) -> Tensor:
        parts = sorted(parts, key=lambda piece: piece.start)
        if len(parts) == 1 and parts[0].rows.ndim == 0:
            return parts[0].rows
        at, end = (0, parts[0].total) if rows is None else (rows.start, rows.stop)
        for piece in parts:
            if piece.rows.ndim == 0 or piece.total != parts[0].total:
                break
            if len(piece.rows) and piece.start == at:
                at += len(piece.rows)
        if at != end or sum(len(piece.rows) for piece in parts if piece.rows.ndim) != end - (
            0 if rows is None else rows.start
        ):
            raise CheckpointError(f"{self.path}: the rows of {name} are not all there")
        return parts[0].rows if len(parts) == 1 else torch.cat([piece.rows for piece in parts])


# ---- Writing ------------------------------------------------------------------------------------


def own_piece(tensor: Tensor, rank: int, ranks: int) -> Piece | None:
    """The rows of a tensor that `rank` writes: an equal share among those that hold the same ones.

    None of too few; scalars are rank 0's.
    """
    if tensor.ndim == 0:
        return Piece(tensor, 0, 0) if rank == 0 else None
    total, held, first = len(tensor), local(tensor), rows_of(tensor).start
    shards = tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1
    replica, replicas = rank // shards, ranks // shards
    start, end = (len(held) * edge // replicas for edge in (replica, replica + 1))
    return Piece(held[start:end], first + start, total) if start < end else None


def partial_folder(folder: Path, step: int, attempt: str) -> Path:
    """Where the checkpoint of `step` grows; `attempt` tells one start of the run from another."""
    return folder / f".partial-{folder_name(step)}-{attempt}"


def write_part(
    partial: Path, groups: Mapping[str, Mapping[str, Piece]], rank: int, ranks: int
) -> None:
    """Write this rank's files, each to the disk, then their record. Raises `CheckpointError`."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        records = {}
        for group, pieces in groups.items():
            file = partial / f"{group}-{rank:05d}-of-{ranks:05d}.safetensors"
            tensors = {name: piece.rows.contiguous() for name, piece in pieces.items()}
            rows = {name: [piece.start, piece.total] for name, piece in pieces.items()}
            save_file(tensors, file, metadata={"rows": json.dumps(rows)})
            records[file.name] = _synced_record(file)
        _write_json(part_record(partial, rank), records)
    except (OSError, SafetensorError) as error:
        raise _not_written(partial, error) from error


def part_record(partial: Path, rank: int) -> Path:
    """The file that appears when `rank` has written its part."""
    return partial / f".part-{rank:05d}.json"


def commit(partial: Path, step: int, ranks: int, state: Mapping[str, Any]) -> Checkpoint:
    """Complete the parts of all ranks to a checkpoint. Raises `CheckpointError`; nothing is lost.

    One of the same step that stands already is replaced: it is the same, or damaged.
    """
    final = partial.with_name(folder_name(step))
    state = {**state, "step": step}
    try:
        _write_json(partial / STATE, state)
        files = {STATE: _record(partial / STATE)}
        for rank in range(ranks):
            record = part_record(partial, rank)
            files |= json.loads(record.read_text())
            record.unlink()
        _write_json(partial / MANIFEST, {"format": FORMAT, "files": files})
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise _not_written(partial, error) from error
    return Checkpoint(final, state)


def save(
    folder: Path, step: int, tensors: Mapping[str, dict[str, Tensor]], state: Mapping[str, Any]
) -> Checkpoint:
    """Write a checkpoint from one process, at once. Raises `CheckpointError`."""
    partial = partial_folder(folder, step, str(os.getpid()))
    try:
        write_part(partial, pieces_of(tensors, 0, 1), 0, 1)
        return commit(partial, step, 1, state)
    except CheckpointError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def pieces_of(
    tensors: Mapping[str, Mapping[str, Tensor]], rank: int, ranks: int
) -> dict[str, dict[str, Piece]]:
    """This rank's pieces of groups of replicated tensors."""
    return {
        group: {
            name: piece
            for name, tensor in members.items()
            if (piece := own_piece(tensor.detach(), rank, ranks)) is not None
        }
        for group, members in tensors.items()
    }


def take_over(folder: Path, attempt: str) -> None:
    """This start of the run owns the folder from now on; what others left half written goes.

    A process of an earlier start may still be alive, cut off from the cluster that lost it.
    """
    for leftover in folder.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with contextlib.suppress(OSError):  # a disk that cannot be written shows at the first save
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OWNER).write_text(attempt)


def require_ownership(folder: Path, attempt: str) -> None:
    """Raises `CheckpointError` where a later start of the run has taken over."""
    owner = folder / OWNER
    if owner.is_file() and owner.read_text() != attempt:
        raise CheckpointError(f"{folder}: another process has taken over this run")


# ---- Finding and checking -----------------------------------------------------------------------


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint whose checksums hold, or None."""
    return newest_usable(folder)[0]


def newest_usable(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The same, and why each newer one cannot be used."""
    refused: list[str] = []
    for step in reversed(steps_in(folder)):
        path = folder / folder_name(step)
        if found := problems(path):
            refused += found
        else:
            return Checkpoint(path, json.loads((path / STATE).read_text())), refused
    return None, refused


def newest_state(folder: Path) -> Mapping[str, Any] | None:
    """What the newest checkpoint says of itself; its tensors are not read. None if there is none.

    Raises `CheckpointError` where it cannot be read.
    """
    steps = steps_in(folder)
    if not steps:
        return None
    file = folder / folder_name(steps[-1]) / STATE
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def at_step(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of that step. Raises `CheckpointError` that names those there are."""
    path = folder / folder_name(step)
    if not path.is_dir():
        steps = ", ".join(str(number) for number in steps_in(folder)) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; there are: {steps}")
    return at_path(path)


def at_path(path: Path) -> Checkpoint:
    """The checkpoint in that folder, whatever its name. Raises `CheckpointError`."""
    found = problems(path)
    if found:
        raise CheckpointError("; ".join(found))
    return Checkpoint(path, json.loads((path / STATE).read_text()))


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, damaged ones too, in order."""
    steps = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(
        int(step) for step in steps if step.isdecimal() and folder_name(int(step))[5:] == step
    )


def problems(path: Path) -> list[str]:
    """Why a checkpoint folder cannot be used; empty where it is complete and intact."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version, files = manifest["format"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path / MANIFEST}: {type(error).__name__}: {error}"]
    if version != FORMAT:
        return [f"{path}: format {version}, this version reads {FORMAT}"]
    found = []
    for name, record in files.items():
        file = path / name
        if Path(name).name != name or file.is_symlink():
            found.append(f"{file}: a name outside the checkpoint")
        elif not file.is_file():
            found.append(f"{file}: missing")
        else:
            try:
                same = file.stat().st_size == record.get("bytes") and _record(file) == record
            except OSError as error:
                found.append(f"{file}: {error}")
                continue
            if not same:
                found.append(f"{file}: size or checksum differs from the manifest")
    unlisted = {file.name for file in path.glob("*.safetensors")} - files.keys()
    found += [f"{path / name}: not in the manifest" for name in sorted(unlisted)]
    return found


def prune(
    newest: Checkpoint, keep: int, always: Callable[[int], bool] = lambda step: False
) -> None:
    """Remove all but the `keep` checkpoints up to `newest`, just written, and `always` kept steps.

    Later ones belong to another past: the run went back behind them since they were damaged.
    """
    folder = newest.path.parent
    before = [step for step in steps_in(folder) if step <= newest.step]
    wanted = {*before[-keep:], *filter(always, before)}
    for step in steps_in(folder):
        if step not in wanted:
            shutil.rmtree(folder / folder_name(step))


# ---- The model's side ---------------------------------------------------------------------------


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, a tied one once."""
    return dict(model.named_parameters())


def sharded_rows(model: nn.Module) -> dict[str, slice]:
    """This rank's rows of each parameter that it does not hold whole."""
    parameters = model.named_parameters()
    return {name: rows_of(p) for name, p in parameters if isinstance(p, DTensor)}


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `model_tensors` gave: whole tensors, or of a sharded model this rank's rows.

    Raises `CheckpointError` where names, shapes or types differ.
    """
    parameters = model_tensors(model)
    if parameters.keys() != tensors.keys():
        differing = ", ".join(sorted(parameters.keys() ^ tensors.keys()))
        raise CheckpointError(f"the checkpoint is of another model; it differs in {differing}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = tensors[name]
            own = local(parameter)
            if (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} in the checkpoint, "
                    f"{tuple(own.shape)} {own.dtype} in the model"
                )
            own.copy_(tensor)


# ---- Files --------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    """Of the checkpoint of that step, within a run's `checkpoints`."""
    return f"step-{step:08d}"


def _read_pieces(file: Path, wanted: Mapping[str, slice]) -> list[tuple[str, Piece]]:
    try:
        with safe_open(file, "pt") as reader:
            rows = json.loads((reader.metadata() or {})["rows"])
            names = reader.keys()  # no mapping: it cannot be iterated over
            return [(name, _read_piece(reader, name, rows[name], wanted)) for name in names]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def _read_piece(
    reader: Any, name: str, place: tuple[int, int], wanted: Mapping[str, slice]
) -> Piece:
    """What a file holds of the rows wanted, which may be none."""
    start, total = place
    if name not in wanted:
        return Piece(reader.get_tensor(name), start, total)
    part = reader.get_slice(name)
    end = start + part.get_shape()[0]
    first, last = max(start, wanted[name].start), min(end, wanted[name].stop)
    if first >= last:
        return Piece(part[0:0], start, total)
    return Piece(part[first - start : last - start], first, total)


def _not_written(partial: Path, error: Exception) -> CheckpointError:
    folder = partial.parent
    free = f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free" if folder.is_dir() else "missing"
    return CheckpointError(f"{partial.name} could not be written to {folder} ({free}): {error}")


def _synced_record(path: Path) -> dict[str, Any]:
    """Size and SHA-256, computed while the disk takes the file."""
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(_sync, path)
        record = _record(path)
        synced.result()
    return record


def _record(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _write_json(path: Path, value: Any) -> None:
    """The file appears whole: another rank may be waiting for it."""
    growing = path.with_name(f"{path.name}~")
    growing.write_text(json.dumps(value, indent=1))
    _sync(growing)
    growing.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
