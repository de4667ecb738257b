"""What a run trains: model, recipe and mixture, from the configuration."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from model import HybridModel, ModelConfig
from pipeline.config import Config, ConfigError
from pipeline.data.mixture import Mixture
from pipeline.train.schedule import Schedule
from quant import Recipe, named_recipe

if TYPE_CHECKING:  # it brings file systems that a plan does not need
    from pipeline.data.shards import Dataset


def build_model(config: Config, device: torch.device) -> HybridModel:
    """The freshly initialized model, the same for the same seed on any number of ranks.

    Under `torch.device("meta")` it is one without memory, for `device`.
    """
    shape = ModelConfig.from_dict(dataclasses.asdict(config.model))
    checkpointing: Any = config.train.activation_checkpointing
    model = HybridModel(shape, compute_dtype(device), checkpointing, config.seed)
    return model if model.embedding.weight.is_meta else model.to(device)


def compute_dtype(device: torch.device) -> torch.dtype:
    """What activations are in: BF16 on CUDA, FP32 on a CPU, where BF16 is not faster everywhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build_recipe(config: Config, name: str | None = None) -> Recipe:
    """The precision recipe, or the one of that name, with the configured BF16 blocks."""
    ends = (config.precision.first, config.precision.last)
    first, last = (end if 0 < end < 1 else int(end) for end in ends)
    return named_recipe(name or config.precision.recipe).with_blocks(first, last)


def build_mixture(config: Config, schedule: Schedule, dataset: Dataset) -> Mixture:
    """The plan that orders the dataset's units.

    Raises `ConfigError` for a blend that cannot be had, and where a source that may not repeat ends
    before the plan does.
    """
    units = {name: dataset.num_units(name, schedule.unit_length) for name in dataset.sources}
    mixture = Mixture(
        units, schedule.mixture_phases(), block=config.data.mixture_block, seed=config.data.seed
    )
    wanted = mixture.used(len(mixture))
    for name, source in config.data.sources.items():
        if not source.repeat and wanted[name] > units[name]:
            raise ConfigError(
                f"data.sources.{name}.repeat=false: the plan needs {wanted[name]:,} rows of "
                f"{schedule.unit_length} tokens of it, and it has {units[name]:,}; lower its "
                "share, train fewer tokens, or let it repeat"
            )
    return mixture
