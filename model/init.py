"""Every initial value, in one table; a shard's values without the rest."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.config import ModelConfig

if TYPE_CHECKING:
    from model.hybrid import HybridModel

RESIDUAL_WRITERS = ("mamba.out.weight", "attention.o.weight", "ffn.down.weight")
DRAWN_ELEMENTS = 1 << 22
"""Elements drawn from one generator: 16 MiB in FP32, the most that exists beside a shard. Part of
what a seed means: larger parameters change with it."""


def materialize(model: HybridModel, seed: int, device: torch.device | str) -> None:
    """Give a model that was built under ``torch.device("meta")`` memory and its initial values.

    Shard it in between (FSDP2's ``fully_shard``, ``distribute_tensor``): each rank then holds and
    draws its own part only, and the values are those of an unsharded model of the same seed::

        with torch.device("meta"):
            model = HybridModel(config)
        fully_shard(model)
        materialize(model, seed, "cuda")

    Linears may be swapped before it, under the same parameter names.
    """
    model.to_empty(device=device)
    model.tie_head()  # to_empty has given each module a parameter of its own
    init_weights(model, seed)


@torch.no_grad()
def init_weights(model: HybridModel, seed: int) -> None:
    """Set every parameter of ``model`` in place; of a DTensor, this rank's part.

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

    One residual write a block, hence ``num_blocks`` (Megatron's rule for hybrids). Values are drawn
    on the CPU, by ``initial_rows``: a seed gives the same ones on any device, in any order and
    sharding.
    """
    for name, parameter in model.named_parameters():
        local, offset = _local_part(parameter)
        columns = [slice(at, at + n) for at, n in zip(offset[1:], local.shape[1:], strict=True)]
        size = _rows_drawn(parameter.shape)
        start, end = offset[0], offset[0] + local.shape[0]
        while start < end:
            stop = min(end, (start // size + 1) * size)  # one piece at a time
            rows = initial_rows(name, parameter.shape, model.config, seed, start, stop)
            local[start - offset[0] : stop - offset[0]].copy_(rows[(slice(None), *columns)])
            start = stop


def initial_rows(
    name: str, shape: torch.Size, config: ModelConfig, seed: int, start: int, stop: int
) -> Tensor:
    """Rows ``start`` to ``stop - 1`` of the initial values of the parameter ``name``, FP32.

    Rows are drawn in pieces of ``DRAWN_ELEMENTS``, each from a generator that is seeded by (seed,
    name, piece). ``shape`` is the whole parameter's.
    """
    size = _rows_drawn(shape)
    pieces = []
    for first in range(start // size * size, stop, size):
        last = min(first + size, shape[0])
        # The first piece, all that small parameters have, goes without a number.
        key = f"{seed}:{name}" + (f":{first // size}" if first else "")
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        value = torch.empty(last - first, *shape[1:], dtype=torch.float32)
        _draw(name, value, config, generator)
        pieces.append(value[max(start - first, 0) : stop - first])
    return torch.cat(pieces)


def _rows_drawn(shape: torch.Size) -> int:
    """How many rows of a parameter are one piece."""
    return max(1, DRAWN_ELEMENTS // shape[1:].numel())


def _draw(name: str, value: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Fill ``value``, some rows of the parameter ``name``."""
    if name.endswith((".D", "norm.weight")):
        value.fill_(1.0)
    elif name.endswith("conv.weight"):
        bound = 1 / math.sqrt(value.shape[-1])
        value.uniform_(-bound, bound, generator=generator)
    elif name.endswith("conv.bias"):
        value.zero_()
    elif name.endswith("A_log"):
        value.uniform_(config.a_init_min, config.a_init_max, generator=generator).log_()
    elif name.endswith("dt_bias"):
        low, high = math.log(config.dt_init_min), math.log(config.dt_init_max)
        value.uniform_(low, high, generator=generator).exp_().clamp_(min=config.dt_init_floor)
        value += torch.log(-torch.expm1(-value))
    else:
        std = config.init_std
        if name.endswith(RESIDUAL_WRITERS):
            std /= math.sqrt(config.num_blocks)
        value.normal_(0.0, std, generator=generator)


def _local_part(parameter: nn.Parameter) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of ``parameter``, and where in it that begins."""
    if not hasattr(parameter, "device_mesh"):  # no DTensor, whose module takes seconds to import
        return parameter, (0,) * parameter.ndim
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)
