"""Reading a Hugging Face model folder: config.json and safetensors, whole or in shards.

Nothing in such a folder is run or unpickled, and its index names no file outside it (its own links
are followed: the hub's cache is made of them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model import ModelConfig
from model.hf import config_from_nemotron_h
from pipeline.config import ConfigError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
TOKENIZER = "tokenizer.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `ConfigError` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object")
    return value


def read_model_config(folder: Path) -> ModelConfig:
    """The folder's architecture.

    Raises `ConfigError`, naming the file and the key, for another architecture than ours.
    """
    values = read_json(folder / CONFIG)
    kind = values.get("model_type")
    if kind != "nemotron_h":
        raise ConfigError(f"{folder / CONFIG}: model_type={kind!r}; only nemotron_h can be read")
    try:
        return config_from_nemotron_h(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors by name, on the CPU, in their stored types.

    Raises `ConfigError`, naming the file, where one is missing or damaged, or where the index names
    a file outside the folder or tensors that its file does not hold.
    """
    if not (folder / INDEX).is_file():
        return _read_file(folder / WHOLE)
    wanted = read_json(folder / INDEX).get("weight_map")
    if not isinstance(wanted, dict) or not all(isinstance(f, str) for f in wanted.values()):
        raise ConfigError(f"{folder / INDEX}: has no weight_map of tensors to files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(wanted.values())):
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX}: {name!r} lies outside the folder")
        tensors |= _read_file(folder / name)
    differing = sorted(tensors.keys() ^ wanted.keys())
    if differing:
        raise ConfigError(f"{folder / INDEX}: index and files differ in {', '.join(differing[:5])}")
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.is_symlink() and not path.resolve().is_file():
        raise ConfigError(f"{path}: a link to nothing")
    if not path.is_file():
        raise ConfigError(f"{path}: missing; weights are read from safetensors files only")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
