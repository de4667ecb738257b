"""The model that a run's checkpoint holds, ready to use."""

from __future__ import annotations

import torch

from model import HybridModel
from pipeline.config import Config, ConfigError
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from pipeline.train.build import build_model, build_recipe
from pipeline.train.checkpoint import Checkpoint, CheckpointError
from quant import Precision, apply_recipe


def find_checkpoint(config: Config, run: RunFolder) -> Checkpoint:
    """The checkpoint of `step`, or the newest. Raises `ConfigError`."""
    if config.one_step is not None:
        try:
            return checkpoint.at_step(run.checkpoints, config.one_step)
        except CheckpointError as error:
            raise ConfigError(f"step={config.step}: {error}") from error
    found = checkpoint.latest(run.checkpoints)
    if found is None:
        raise ConfigError(
            f"{run.path} has no complete checkpoint; train first: pipeline run resume={run.id}"
        )
    return found


def load_model(
    config: Config, found: Checkpoint, device: torch.device
) -> tuple[HybridModel, Precision]:
    """The checkpoint's weights in a model for inference, and the handle on its precision.

    It stands in its recipe's precision; set `Precision.mode` for BF16.
    """
    model = build_model(config, device)
    checkpoint.load_model_tensors(model, found.tensors("model"))
    precision = apply_recipe(
        model,
        build_recipe(config),
        num_blocks=len(config.model.pattern),
        seed=config.seed,
        weight_dtype=getattr(torch, found.state.get("weight_dtype", "float32")),
    )
    return model.eval(), precision


def inference_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
