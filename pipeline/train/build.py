"""What a run trains: model, recipe and mixture, from the configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from model import HybridModel, ModelConfig
from model.init import materialize
from pipeline.config import Config, ConfigError
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset
from pipeline.train.reduction import Reduction, ReproducibleReduction, ReproducibleScatter
from pipeline.train.schedule import Schedule
from pipeline.train.sharding import ShardedWeights, Sharding, fsdp_modules, shard_model
from quant import Precision, Recipe, apply_recipe, named_recipe


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


@dataclass(frozen=True)
class Trainable:
    """A model with all that a step does to it but the optimizer.

    weights: None where this rank holds whole weights.
    """

    model: HybridModel
    precision: Precision
    reduction: Reduction
    sharding: Sharding
    weights: ShardedWeights | None

    @property
    def codes_nbytes(self) -> int:
        """Bytes of quantized weights on this rank: whole ones, or its rows."""
        own = 0 if self.weights is None else self.weights.codes_nbytes
        return own + self.precision.cache_nbytes

    @property
    def gathered_as_values(self) -> str:
        """Linears whose rows are cut amid blocks, with the reason; empty where there is none."""
        reasons = {} if self.weights is None else self.weights.as_values
        return "; ".join(f"{name} ({reason})" for name, reason in reasons.items())

    def changed(self, *_: object) -> None:
        """Call it after every update (as a hook of the optimizer) and every load."""
        if self.weights is not None:
            self.weights.changed()

    def prepare(self) -> None:
        """Call it before a forward pass that follows a change of weights or of the mode."""
        if self.weights is not None:
            self.weights.prepare()

    def reshard(self) -> None:
        """Call it after forward passes without a backward pass: what they gathered goes."""
        if self.weights is not None:
            for module in fsdp_modules(self.model):
                module.reshard()


def build_trainable(config: Config, device: torch.device) -> Trainable:
    """The model in its recipe's precision, sharded as configured; weights are those of the seed.

    Raises `ConfigError` where the ranks cannot be cut so, `ValueError` where the recipe does not
    fit the model.
    """
    sharding = Sharding.over(config.cluster.shard, device)
    built_on = device if sharding.mesh is None else torch.device("meta")
    with torch.device(built_on):
        model = build_model(config, device)
    precision = apply_recipe(
        model,
        build_recipe(config),
        num_blocks=len(config.model.pattern),
        seed=config.seed,
        weight_dtype=model.compute_dtype,
    )
    return assemble(model, precision, sharding, config, device)


def assemble(
    model: HybridModel,
    precision: Precision,
    sharding: Sharding,
    config: Config,
    device: torch.device,
) -> Trainable:
    """Shard a model (then on the meta device) and choose how its gradients are added up."""
    precision.adds_weight_gradients = True
    if config.train.compile:
        model.compile_blocks()
    groups, cluster, train = (sharding.replicas, sharding.shards), config.cluster, config.train
    weights = None
    if sharding.mesh is not None:
        shard_model(model, sharding)
        materialize(model, config.seed, device)
        weights = ShardedWeights(model, precision, sharding.shards, cluster.fp4_gather)
    if not train.reproducible:
        plain = Reduction(model, *groups, scatter_each=cluster.scatter_each_micro_batch)
        return Trainable(model, precision, plain, sharding, weights)
    reduction = ReproducibleReduction(model, train.global_batch // train.micro_batch, *groups)
    for module in fsdp_modules(model):
        module.set_custom_reduce_scatter(ReproducibleScatter(reduction))
    return Trainable(model, precision, reduction, sharding, weights)


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
