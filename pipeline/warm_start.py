"""`train.init_from`: begin with another model's weights, and nothing else of it.

The source is a run (`<run>`, its newest checkpoint, or `<run>@<step>`), a checkpoint's folder, or a
Hugging Face `nemotron_h` folder. Optimizer, schedule, data order and precision are the new run's
own: its warm-up is the re-warm-up, and weights trained in one precision go on in another.
`warm_start.json` in the run's folder says what it began from; the source is not needed any more
once the run has a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import HybridModel, ModelConfig
from model.hf import from_nemotron_h
from pipeline.config import Config, ConfigError
from pipeline.data.shards import Dataset
from pipeline.data.tokenizer import TEKKEN, load_tokenizer
from pipeline.hf_folder import CONFIG, TOKENIZER, read_json, read_model_config, read_tensors
from pipeline.runs import RunFolder, find_run, root_folder, write_whole
from pipeline.train import checkpoint
from pipeline.train.checkpoint import CheckpointError, load_model_tensors, sharded_rows

FILE = "warm_start.json"
FREE = {"init_std", "dt_init_min", "dt_init_max", "dt_init_floor", "a_init_min", "a_init_max"} | {
    "mamba_chunk_size",  # how the scan is computed
    "dt_floor",  # transformers' clamp of the time step, which training has not
}
"""Fields of the architecture that may differ: they change no tensor's shape or meaning."""


@dataclass(frozen=True)
class WarmStart:
    """Where a run's first weights come from.

    kind: "checkpoint" or "huggingface". path: the folder. step, run: of a checkpoint, where known.
    """

    wanted: str
    kind: str
    path: str
    step: int | None = None
    run: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def warm_start_of(run: RunFolder) -> WarmStart | None:
    """What a run began from; None for fresh weights."""
    file = run.path / FILE
    return WarmStart(**json.loads(file.read_text())) if file.is_file() else None


def write_warm_start(run: RunFolder, source: WarmStart) -> None:
    write_whole(run.path / FILE, json.dumps(source.to_dict(), indent=1))


def find_source(config: Config) -> WarmStart:
    """Resolve `train.init_from` and compare architectures. No weights are read.

    Raises `ConfigError`, naming what is missing or what differs.
    """
    wanted = str(config.train.init_from)
    try:
        source, shape = _resolve(config, wanted)
        _require_same(shape, ModelConfig.from_dict(asdict(config.model)))
    except (CheckpointError, ValueError) as error:
        raise ConfigError(f"train.init_from={wanted}: {error}") from error
    return source


def load_weights(source: WarmStart, model: HybridModel, dataset: Dataset) -> None:
    """Put the source's weights into the model.

    Raises `ConfigError` where its tokenizer is another, so that token ids mean other texts, or a
    tensor is missing, surplus or of another shape.
    """
    rows = sharded_rows(model)
    try:
        if source.kind == "huggingface":
            _require_tokenizer(Path(source.path), dataset)
            tensors = _from_folder(Path(source.path), model.config)
            for name, parameter in model.named_parameters():
                if name in rows and name in tensors and tensors[name].shape == parameter.shape:
                    tensors[name] = tensors[name][rows[name]]
        else:
            tensors = _from_checkpoint(Path(source.path), dataset, rows)
        load_model_tensors(model, tensors)
    except (CheckpointError, ValueError) as error:
        raise ConfigError(f"train.init_from={source.wanted}: {error}") from error


def _resolve(config: Config, wanted: str) -> tuple[WarmStart, ModelConfig]:
    folder = Path(wanted).expanduser()
    if (folder / checkpoint.STATE).is_file():
        return _checkpoint(wanted, folder.resolve())
    if (folder / CONFIG).is_file():
        return WarmStart(wanted, "huggingface", str(folder.resolve())), _shape_of_folder(folder)
    if folder.is_dir() and folder.parent.resolve() == root_folder(config):
        wanted = folder.name  # a run, by its folder
    elif folder.is_dir():
        raise ConfigError(f"holds neither {checkpoint.STATE} nor {CONFIG}: no checkpoint, no model")
    elif "/" in wanted:
        raise ConfigError("no such folder; a run is given by its id: <run> or <run>@<step>")
    name, at, step = wanted.rpartition("@")
    run = find_run(root_folder(config), name if at else wanted)
    if at and not step.isdigit():
        raise ConfigError("give <run>@<step>, a checkpoint's folder, or a Hugging Face folder")
    if at:
        found = checkpoint.at_step(run.checkpoints, int(step))
    else:
        newest = checkpoint.latest(run.checkpoints)
        if newest is None:
            raise ConfigError(f"run {run.id} has no complete checkpoint")
        found = newest
    return _checkpoint(wanted, found.path)


def _checkpoint(wanted: str, path: Path) -> tuple[WarmStart, ModelConfig]:
    problems = checkpoint.problems(path)
    if problems:
        raise ConfigError("; ".join(problems))
    state = json.loads((path / checkpoint.STATE).read_text())
    run = path.parent.parent.name if path.parent.name == "checkpoints" else None  # else a copy
    source = WarmStart(wanted, "checkpoint", str(path), state["step"], run)
    return source, ModelConfig.from_dict(state["config"]["model"])


def _shape_of_folder(folder: Path) -> ModelConfig:
    if read_json(folder / CONFIG).get("quantization_config"):
        raise ConfigError(
            f"{folder / CONFIG}: quantization_config: packed weights are for serving; start from "
            "the run they were exported from, or from its export with format=hf"
        )
    if not any((folder / name).is_file() for name in (TOKENIZER, TEKKEN)):
        raise ConfigError(
            f"{folder} has no {TOKENIZER}, so nobody can tell what its token ids mean; put that of "
            "its weights there"
        )
    load_tokenizer(folder)
    return read_model_config(folder)


def _require_same(theirs: ModelConfig, ours: ModelConfig) -> None:
    differing = [
        f"{field.name} ({then!r} there, {now!r} here)"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in FREE
        and (then := getattr(theirs, field.name)) != (now := getattr(ours, field.name))
    ]
    if differing:
        raise ConfigError(
            f"its model differs in {', '.join(differing)}; give its architecture with model=..."
        )


def _from_checkpoint(path: Path, dataset: Dataset, rows: Mapping[str, slice]) -> dict[str, Tensor]:
    found = checkpoint.at_path(path)
    if found.state["identity"]["tokenizer"] != dataset.manifest["tokenizer"]["sha256"]:
        raise ConfigError(
            "the corpus has another tokenizer than the weights, so its token ids mean other texts; "
            "name theirs with data.tokenizer.path"
        )
    return found.tensors("model", rows)


def _require_tokenizer(folder: Path, dataset: Dataset) -> None:
    theirs, ours = (
        load_tokenizer(path).get_vocab(with_added_tokens=True)
        for path in (folder, dataset.tokenizer_path)
    )
    if theirs != ours:
        raise ConfigError(
            "the corpus has another tokenizer than the weights, so its token ids mean other texts; "
            f"name theirs with data.tokenizer.path={folder}"
        )


def _from_folder(folder: Path, shape: ModelConfig) -> dict[str, Tensor]:
    tensors = from_nemotron_h(read_tensors(folder), shape)
    if shape.tie_embeddings and not torch.equal(
        tensors["embedding.weight"], tensors.pop("head.weight")
    ):
        raise ConfigError("tie_embeddings: its embedding and head differ; set tie_embeddings=false")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ConfigError(f"{name} holds {tensor.dtype}, no weights")
    return {name: tensor.float() for name, tensor in tensors.items()}
