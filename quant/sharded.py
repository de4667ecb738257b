"""A linear's weight in rows over ranks: what FSDP2 gathers of it, and what it gathers into.

    FP32 rows of each rank            master weights, what the optimizer updates
        | rounded to the model's dtype
        | quantized, where all ranks hold equal multiples of 16 rows of a weight in 16 x 16 blocks
        v                             (the amax of all ranks' rows gives the one global scale)
    codes [rows, K/2], scales [rows/16, K/16]     4.03 bits an element; else values, 16 bits
        | all-gather, before each forward and each backward pass
        v
    `GatheredWeight` [N, K]           the parameter while it is whole: FP32 to autograd, so that its
                                      gradient is FP32, though it holds codes or BF16 values alone

Codes gathered are bit for bit those of the values gathered and then quantized. The transposed copy
for Dgrad is made from the codes. FSDP2 asks a shard what to gather through two hooks
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`), which `ShardedWeight` has.

Legend: K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from quant.formats import NVFP4_2D
from quant.gathered import Gathered, GatheredWeight
from quant.linear import QuantLinear
from quant.quantize import amax_and_nonfinite, quantize

BLOCK = NVFP4_2D.block[0]


@dataclass(frozen=True)
class ShardCodes:
    """A shard's codes.

    grid: one scale for each 16 x 16 block, [rows/16, K/16], as bytes.
    """

    packed: Tensor
    grid: Tensor
    global_scale: Tensor


class ShardedWeight(torch.Tensor):
    """One rank's rows of a weight, [rows, K] in FP32: a plain tensor with FSDP2's two hooks.

    layer: whose weight it is.
    padded_rows: rows of the rank that has most.
    aligned: whether each rank has as many rows, a multiple of 16: only then can it be gathered as
        codes.
    kind_changes: called before each gather with whether codes are gathered.
    codes: of the rows as they are; None since they changed. Updates of FSDP2's parameters count in
        no version, so whoever changes them says so.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    layer: QuantLinear
    padded_rows: int
    aligned: bool
    kind_changes: Callable[[bool], None]
    codes: ShardCodes | None = None

    @property
    def as_codes(self) -> bool:
        """Whether it is gathered as codes in the present mode: where both passes read them."""
        recipe = self.layer.recipe
        return self.aligned and recipe.weight.spec == recipe.dgrad_weight.spec == NVFP4_2D

    def rounded(self) -> Tensor:
        """Its rows as the forward pass sees them."""
        return self.detach().to(self.layer.weight_dtype)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What to gather of these rows; the global scale, where that is codes."""
        self.kind_changes(self.as_codes)
        if not self.as_codes:
            rows = self.rounded()
            return (functional.pad(rows, (0, 0, 0, self.padded_rows - len(rows))),), None
        made = self.codes
        assert made is not None, f"{self.layer.name}: prepare_shards comes before a forward pass"
        return (made.packed, made.grid), made.global_scale

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[Tensor],
        global_scale: Tensor | None,
        dtype: Any,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight around what was gathered; into `out` where there is one already."""
        rows, columns = self.layer.out_features, self.layer.in_features
        content = out.content if out is not None else Gathered(torch.Size((rows, columns)))
        content.values = content.codes = None
        if global_scale is None:
            content.values = outputs[0].view(-1, columns)[:rows]
        else:
            content.codes, content.format = outputs[0].view(rows, -1), NVFP4_2D
            content.grid, content.global_scale = outputs[1].view(-1, columns // BLOCK), global_scale
        return None if out is not None else (GatheredWeight(content, self.device), ())


def prepare_shards(weights: Sequence[ShardedWeight], group: dist.ProcessGroup) -> None:
    """Quantize this rank's rows of all weights that are gathered as codes and have none.

    All ranks of `group`, which together hold the weights, call it. One reduction, of a value per
    weight, finds all global scales.
    """
    wanted = [w for w in weights if w.as_codes and w.codes is None]
    if not wanted:
        return
    shards = [w.rounded() for w in wanted]
    found = [amax_and_nonfinite(rows) for rows in shards]
    amaxes = torch.stack([amax for amax, _ in found])
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)
    for w, rows, amax, (_, nonfinite) in zip(wanted, shards, amaxes, found, strict=True):
        q = quantize(rows, NVFP4_2D, amax=amax)
        assert q.global_scale is not None
        grid = q.scales.view(torch.uint8)[::BLOCK].contiguous()
        w.codes = ShardCodes(q.codes, grid, q.global_scale)
        w.layer.shared.count_nonfinite(nonfinite)
