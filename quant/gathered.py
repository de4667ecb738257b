"""A weight that was gathered from other ranks: a parameter without values of its own.

Legend: K input features, N output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.formats import Format
from quant.quantize import QuantizedTensor


@dataclass
class Gathered:
    """What is there of a weight [N, K] while it is whole: values, or codes with their scales.

    values: in the dtype that weights have in the forward pass.
    grid: one scale for each block of `format`.
    """

    shape: torch.Size
    values: Tensor | None = None
    codes: Tensor | None = None
    grid: Tensor | None = None
    global_scale: Tensor | None = None
    format: Format | None = None

    def quantized(self) -> QuantizedTensor:
        """The weight as it came; made anew at each use, so that nothing outlives the gather."""
        assert self.codes is not None
        assert self.grid is not None
        assert self.format is not None
        rows = self.grid.view(torch.uint8).repeat_interleave(self.format.block[0], dim=0)
        scales = rows.view(self.format.scale_dtype)
        return QuantizedTensor(self.codes, scales, self.global_scale, self.format, self.shape)


class GatheredWeight(torch.Tensor):
    """A whole weight [N, K] that is FP32 to autograd, so that its gradient is FP32.

    Only a `QuantLinear` can read it: there is no FP32 value behind it.
    """

    content: Gathered
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, content: Gathered, device: torch.device) -> GatheredWeight:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, content.shape, dtype=torch.float32, device=device
        )
        made.content = content
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> GatheredWeight:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return cls(args[0].content, args[0].device)
        raise NotImplementedError(f"{function}: only a QuantLinear reads a gathered weight")
