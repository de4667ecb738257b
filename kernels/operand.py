"""One side of a GEMM of block-scaled operands, as the tensor cores read it.

Legend: M rows, R the dimension that is reduced.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import Problem

BLOCKS = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32}
"""Elements that share a scale, by the type of the scales."""


class Operand(NamedTuple):
    """Codes along R, and their scales.

    Attributes:
        codes: uint8 [M, R/2] of two E2M1 each, or float8_e4m3fn [M, R].
        scales: float8_e4m3fn (one for 16 elements) or float8_e8m0fnu (for 32), swizzled: flat.
        global_scale: FP32 scalar that everything is multiplied with, or None.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None = None

    @property
    def element(self) -> str:
        """What Triton calls the type of an element."""
        return "e2m1" if self.codes.dtype == torch.uint8 else "e4m3"

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return BLOCKS[self.scales.dtype]

    @property
    def format(self) -> str:
        """Its name in `kernels.dispatch`."""
        if self.block == 16:
            return "nvfp4"
        return "mxfp4" if self.element == "e2m1" else "mxfp8"

    @property
    def depth(self) -> int:
        """R."""
        return self.codes.shape[1] * (2 if self.element == "e2m1" else 1)


def problem(a: Operand, b: Operand) -> Problem:
    """What `kernels.dispatch` calls `a @ b.T`."""
    rows, columns = a.codes.shape[0], b.codes.shape[0]
    return Problem((a.format, b.format), rows, columns, (a.depth, b.depth))
