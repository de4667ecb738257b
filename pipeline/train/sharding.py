"""Weights, gradients and optimizer state in rows over ranks, by FSDP2, and copies of that.

Ranks form a mesh of replicas x shards. The ranks of a row together hold the weights once: FSDP2
(`torch.distributed.fsdp.fully_shard`) gathers a block's before its forward and its backward pass
and scatters the sums of its gradients. The ranks of a column hold the same rows, and sum their
gradients once a step (`Reduction`). With one shard every rank holds everything.

Linears' weights are gathered in the model's dtype, or in four bits (`quant.sharded`); all other
parameters, Mamba's A_log, D and dt_bias among them, in FP32. Gradients are FP32 throughout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from model import HybridModel
from pipeline.train.parallel import Group, Rank
from quant import Precision
from quant.linear import QuantLinear
from quant.sharded import BLOCK, ShardedWeight, prepare_shards

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """The mesh of this run; None where every rank holds whole weights."""

    mesh: DeviceMesh | None = None

    @staticmethod
    def over(shards: int, device: torch.device) -> Sharding:
        """Ranks in rows of so many; in one row for 0, and where so many do not divide the ranks:
        the configured number of workers they divide, but not each that a loss may leave."""
        rank = Rank.current()
        ranks = rank.size
        if ranks == 1 or shards == 1:
            return Sharding()
        if shards and ranks % shards:
            if rank.index == 0:
                _log.warning(
                    "cluster.shard=%d does not divide the %d workers that there are: all of them "
                    "share one copy",
                    shards,
                    ranks,
                )
            shards = 0
        shape = (ranks // (shards or ranks), shards or ranks)
        names = ("replica", "shard")
        return Sharding(init_device_mesh(device.type, shape, mesh_dim_names=names))

    @property
    def replicas(self) -> Group:
        """The ranks that hold what this one holds; None: all."""
        return None if self.mesh is None else self.mesh.get_group("replica")

    @property
    def shards(self) -> Group:
        """The ranks that together hold the weights this one is part of; None: it does alone."""
        return None if self.mesh is None else self.mesh.get_group("shard")


def shard_model(model: HybridModel, sharding: Sharding) -> None:
    """Cut a model on the meta device into rows. Give it memory after it."""
    assert sharding.mesh is not None
    mesh = sharding.mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for name in ("loss", "token_losses", "logits"):
        register_fsdp_forward_method(model, name)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The blocks, and the model itself for what lies outside of them."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class ShardedWeights:
    """The weights of all linears, as what FSDP2 asks for what to gather.

    codes: whether weights that can be are gathered in four bits.

    Attributes:
        as_values: linears that are to be gathered as codes and cannot, with the reason.
    """

    def __init__(self, model: HybridModel, precision: Precision, group: Any, codes: bool) -> None:
        self._group = group
        self._weights: list[ShardedWeight] = []
        self.as_values: dict[str, str] = {}
        layers = {layer.weight: layer for layer in precision.layers.values()}
        tied = model.config.tie_embeddings
        for module in fsdp_modules(model):
            for held in module._get_fsdp_state()._fsdp_param_groups[0].fsdp_params:
                layer = layers.get(held.sharded_param)
                if layer is not None and not (tied and layer is model.head):
                    self._weights.append(self._hooked(held, layer, codes))

    @property
    def codes_nbytes(self) -> int:
        """Bytes of this rank's codes."""
        made = [rows.codes for rows in self._weights if rows.codes is not None]
        return sum(codes.packed.nbytes + codes.grid.nbytes for codes in made)

    def changed(self) -> None:
        """Call it after every update and every load: what was made of the weights is void."""
        for rows in self._weights:
            rows.codes = None

    def prepare(self) -> None:
        """Call it before a forward pass that follows a change of weights or of the mode."""
        prepare_shards(self._weights, self._group)

    def _hooked(self, held: Any, layer: QuantLinear, codes: bool) -> ShardedWeight:
        """Give FSDP2's parameter its two hooks."""
        rows = held.sharded_param._local_tensor.as_subclass(ShardedWeight)
        step = BLOCK * dist.get_world_size(self._group)
        rows.layer = layer
        rows.padded_rows = held.padded_sharded_param_size[0]
        rows.aligned = codes and layer.out_features % step == 0
        rows.kind_changes = _forget_outputs_of(held)
        held.sharded_param._local_tensor = rows
        if codes and not rows.aligned and rows.layer.recipe.weight.format:
            self.as_values[layer.name] = (
                f"{layer.out_features} rows are no multiple of {BLOCK} on each of "
                f"{step // BLOCK} ranks"
            )
        return rows


def _forget_outputs_of(held: Any) -> Callable[[bool], None]:
    """FSDP2 keeps the buffers of the first gather; one of another kind needs others."""
    before: list[bool] = []

    def kind_changes(codes: bool) -> None:
        if before and before[0] != codes:
            held.all_gather_outputs = []
        before[:] = [codes]

    return kind_changes
