"""Every initial value, in one table."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from model.config import ModelConfig

if TYPE_CHECKING:
    from model.hybrid import HybridModel

RESIDUAL_WRITERS = ("mamba.out.weight", "attention.o.weight", "ffn.down.weight")


def init_weights(model: HybridModel, seed: int) -> None:
    """Set every parameter of ``model`` in place.

    ======================================  ==================================================
    parameter                               initial value
    ======================================  ==================================================
    embedding, head, linears                normal(0, init_std)
    mamba.out, attention.o, ffn.down        normal(0, init_std / sqrt(num_blocks)): these write
                                            to the residual stream
    norms' weights, D                       1
    conv.weight                             uniform(-1, 1) / sqrt(taps)
    conv.bias                               0
    A_log                                   log of uniform(a_init_min, a_init_max)
    dt_bias                                 softplus^-1 of log-uniform(dt_init_min,
                                            dt_init_max), at least dt_init_floor
    ======================================  ==================================================

    One residual write a block, hence ``num_blocks`` (Megatron's rule for hybrids). Each parameter
    draws from a generator seeded by (seed, its name) on the CPU: a seed gives the same values
    whatever the device, the order, or the sharding; of a DTensor each rank keeps its own part.
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        value = _initial_value(name, parameter.shape, model.config, generator)
        _assign(parameter, value)


def _initial_value(
    name: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator
) -> Tensor:
    value = torch.empty(shape, dtype=torch.float32)
    if name.endswith((".D", "norm.weight")):
        return value.fill_(1.0)
    if name.endswith("conv.weight"):
        bound = 1 / math.sqrt(shape[-1])
        return value.uniform_(-bound, bound, generator=generator)
    if name.endswith("conv.bias"):
        return value.zero_()
    if name.endswith("A_log"):
        return value.uniform_(config.a_init_min, config.a_init_max, generator=generator).log_()
    if name.endswith("dt_bias"):
        low, high = math.log(config.dt_init_min), math.log(config.dt_init_max)
        dt = value.uniform_(low, high, generator=generator).exp_().clamp_(min=config.dt_init_floor)
        return dt + torch.log(-torch.expm1(-dt))
    std = config.init_std
    if name.endswith(RESIDUAL_WRITERS):
        std /= math.sqrt(config.num_blocks)
    return value.normal_(0.0, std, generator=generator)


@torch.no_grad()
def _assign(parameter: nn.Parameter, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        value = value.to(parameter.device)
        parameter.copy_(
            distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        )
    else:
        parameter.copy_(value)
