"""The GEMM of two block-scaled operands by cuBLAS, on Blackwell."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from kernels.operand import Operand


def scaled_mm(a: Operand, b: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """`a @ b.T` [M, N] in `dtype`, tensor scales applied: NVFP4 or MXFP8, both operands alike.

    What shapes it takes is `kernels.dispatch`'s to know.
    """
    a_scales, kinds, layouts = _scales(a)
    b_scales, _, _ = _scales(b)
    return functional.scaled_mm(
        _codes(a),
        _codes(b).t(),
        a_scales,
        kinds,
        b_scales,
        kinds,
        layouts,
        layouts,
        output_dtype=dtype,
    )


def _codes(operand: Operand) -> Tensor:
    four_bits = operand.element == "e2m1"
    return operand.codes.view(torch.float4_e2m1fn_x2) if four_bits else operand.codes


def _scales(operand: Operand) -> tuple[list[Tensor], list[ScalingType], list[SwizzleType]]:
    if operand.global_scale is None:
        return [operand.scales], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    return (
        [operand.scales, operand.global_scale],
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    )
