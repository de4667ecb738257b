"""A model folder on disk: tensors in shards with an index, checksums, all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config import ConfigError
from pipeline.hf_folder import INDEX, WHOLE

RECORD = "export.json"


def require_free(target: Path) -> None:
    """Raises `ConfigError` where something else than an earlier export stands at `target`."""
    if target.exists() and not (target / RECORD).is_file():
        raise ConfigError(f"folder={target}: exists and is no export; choose another")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write to, which takes its place when all went well.

    An earlier export at that place goes; see `require_free` for what else may stand there.
    """
    beside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        yield beside
        for path in beside.iterdir():
            _sync(path)
        if target.exists():
            shutil.rmtree(target)
        beside.rename(target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"folder={target}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` with their index.

    A tensor larger than that has a shard to itself.
    """
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        _write_shard(folder / WHOLE, shards[0])
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, shard)
        files |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file of a folder, by name."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.name] = {"bytes": path.stat().st_size, "sha256": checksum}
    return found


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # Contiguous copies of their own: safetensors refuses tensors that share memory.
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path, {"format": "pt"})


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
