"""What quantization does to each layer, measured on request.

Per layer and operand (`input`, `weight`, `dgrad_gradient`, `dgrad_weight`, `wgrad_gradient`,
`wgrad_input`):

    flushed            share of elements that are not zero but decode to zero
    scale_zero         share of blocks whose scale is the least: 0 (E8M0: 2^-127)
    scale_subnormal    share of blocks whose scale is a subnormal of its type
    scale_saturated    share of blocks whose scale is the largest of its type. In NVFP4 the block
                       with the tensor's own maximum always is one
    error              norm of the rounding error over the norm of the tensor
    nonfinite          number of NaN and infinite elements

and per layer `weight_gradient/zero`, the share of exactly zero weight gradients. A Wgrad operand is
compared with what it was quantized from: transposed, and after the RHT where there is one.

Legend: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quant.quantize import QuantizedTensor, dequantize

Sums = dict[str, Tensor]  # name -> [numerator, denominator], FP64


class Statistics:
    """Collects over the micro-batches of a step, on the device; nothing is read before `collect`.

    Costs a few passes over each operand while `active`, and nothing else.

    Attributes:
        every: take statistics on the steps that divide by it; 0 for only when requested.
        active: whether this step takes them.
    """

    def __init__(self, every: int = 0) -> None:
        self.every = every
        self.active = False
        self._requested = False
        self._step: int | None = None
        self._sums: Sums = {}

    def request(self) -> None:
        """Take statistics during the next step that begins."""
        self._requested = True

    def restart(self) -> None:
        """Take statistics from now on, of the step under way."""
        self.active, self._sums = True, {}

    def begin(self, step: int) -> None:
        """Turn on or off for `step`; further micro-batches of one step change nothing."""
        if step == self._step:
            return
        self._step = step
        self.active = self._requested or (self.every > 0 and step % self.every == 0)
        self._requested = False
        if self.active:
            self._sums = {}

    def operand(self, layer: str, role: str, x_RC: Tensor, q: QuantizedTensor) -> None:
        """Compare an operand with the tensor it was quantized from."""
        x = x_RC.float()
        # Its code or its block scale flushes an element; the tensor scale is no part of it.
        units = dequantize(q, torch.float32, global_scale=False)
        error = dequantize(q) - x
        scales = q.plain().scales.float()
        limits = torch.finfo(q.scales.dtype)
        least = limits.smallest_normal if q.format.scale == "e8m0" else 0.0
        counts = {
            "flushed": ((x != 0) & (units == 0), x.numel()),
            "scale_zero": (scales <= least, scales.numel()),
            "scale_subnormal": ((scales > 0) & (scales < limits.smallest_normal), scales.numel()),
            "scale_saturated": (scales >= limits.max, scales.numel()),
            "nonfinite": (~torch.isfinite(x), 1),
        }
        for name, (mask, total) in counts.items():
            self._add(f"{layer}/{role}/{name}", mask.sum(), total)
        # In FP32, so that FP64 sums of them are exact in any order.
        squares = (error.double().square().sum().float(), x.double().square().sum().float())
        self._add(f"{layer}/{role}/error", *squares)

    def weight_gradient(self, layer: str, dw_NK: Tensor) -> None:
        """Count the exact zeros of one micro-batch's weight gradient."""
        self._add(f"{layer}/weight_gradient/zero", (dw_NK == 0).sum(), dw_NK.numel())

    def _add(self, name: str, numerator: Tensor, denominator: Tensor | int) -> None:
        pair = torch.stack(
            [numerator.double(), torch.as_tensor(denominator).to(numerator).double()]
        )
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def collect(self, total: Callable[[Sums], Sums] = lambda own: own) -> dict[str, float]:
        """`{"layer/role/stat": value}` of the last step that took them; empty where none did.

        Reads from the device, once, and clears. total: adds up what several ranks have; called
        where the step under way takes statistics, on each of them.
        """
        sums, self._sums = total(self._sums) if self.active else self._sums, {}
        if not sums:
            return {}
        rows: list[list[float]] = torch.stack(list(sums.values())).tolist()
        return {name: _finish(name, *row) for name, row in zip(sums, rows, strict=True)}


def _finish(name: str, numerator: float, denominator: float) -> float:
    stat = name.rsplit("/", 1)[1]
    if stat == "nonfinite":
        return numerator
    ratio = numerator / denominator if denominator else 0.0
    return ratio**0.5 if stat == "error" else ratio
