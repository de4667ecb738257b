"""A model with all that a step does to it: its recipe, its sharding, and how gradients add up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model import HybridModel
from model.init import materialize
from pipeline.config import Config
from pipeline.train.build import build_model, build_recipe
from pipeline.train.reduction import Reduction, ReproducibleReduction, ReproducibleScatter
from pipeline.train.sharding import ShardedWeights, Sharding, fsdp_modules, shard_model
from quant import Precision, apply_recipe


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

    Raises `ValueError` where the recipe does not fit the model.
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
