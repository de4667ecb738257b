"""Values from codes and block scales, and block scales from the tensor cores' layout to plain rows.

Legend: R rows, K columns, B blocks in a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.nvfp4 import scale_offset
from kernels.target import target_of

ROWS, COLUMNS = 16, 512
NUM_WARPS = 4


@triton.jit
def e2m1_value(code):
    """FP32 of int32 E2M1 codes in [0, 16): the code's bits as a tiny float, times 2^126."""
    tiny = ((code & 7) << 22) | ((code & 8) << 28)
    return tiny.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def scale_value(scale, E8M0: tl.constexpr):
    """FP32 of a block scale's byte."""
    if E8M0:
        # The exponent of an FP32, except the lowest, which is half the smallest normal number.
        bits = scale.to(tl.int32) << 23
        return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)
    return scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    global_scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    E8M0: tl.constexpr,
    SWIZZLED: tl.constexpr,
    GLOBAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes: bytes of two, or of one E4M3."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)[None, :]
    blocks = num_columns // BLOCK
    inside = (row < num_rows) & (block < blocks)
    at = scale_offset(row, block, blocks, (blocks + 3) // 4, SWIZZLED)
    scales = scale_value(tl.load(scales_ptr + at, inside, 0), E8M0)[:, :, None]
    BYTES: tl.constexpr = BLOCK * BITS // 8
    first_byte = row.to(tl.int64) * (blocks * BYTES) + block * BYTES
    byte = first_byte[:, :, None] + tl.arange(0, BYTES)[None, None, :]
    codes = tl.load(codes_ptr + byte, inside[:, :, None], 0)
    if BITS == 4:
        pairs = codes.to(tl.int32)
        values = tl.join(e2m1_value(pairs & 15), e2m1_value(pairs >> 4))
        values = tl.reshape(values, (ROWS, COLUMNS // BLOCK, BLOCK))
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    values = values * scales
    if GLOBAL:
        values = values * tl.load(global_scale_ptr)
    first = row.to(tl.int64) * num_columns + block * BLOCK
    element = first[:, :, None] + tl.arange(0, BLOCK)[None, None, :]
    tl.store(out_ptr + element, values.to(out_ptr.dtype.element_ty), inside[:, :, None])


def dequantize(
    codes_RK: Tensor,
    scales: Tensor,
    *,
    columns: int,
    block: int,
    global_scale: Tensor | None,
    dtype: torch.dtype,
    swizzled: bool = False,
) -> Tensor:
    """`code * block scale * global scale` in FP32, rounded to `dtype` at last.

    Args:
        codes_RK: uint8 [R, K/2] of E2M1, or [R, K] of E4M3.
        scales: float8_e4m3fn or float8_e8m0fnu, [R, B] or swizzled.
        columns: K, a multiple of `block`.
        block: elements that share a scale, 16 or 32.
        global_scale: FP32 scalar, or None to leave it out.
        dtype: FP32 or BF16.

    Raises:
        ValueError: columns that the kernel does not take, or such a device.
    """
    rows = codes_RK.shape[0]
    if columns % block:
        raise ValueError(
            f"dequantize takes whole blocks of {block}, not {columns} columns: use plain torch"
        )
    target_of(codes_RK.device)
    out = torch.empty(rows, columns, dtype=dtype, device=codes_RK.device)
    if out.numel():
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
        dequantize_kernel[grid](
            codes_RK.contiguous(),
            scales.contiguous().view(torch.uint8),
            codes_RK if global_scale is None else global_scale,
            out,
            rows,
            columns,
            BITS=8 * codes_RK.shape[1] // columns,
            BLOCK=block,
            E8M0=scales.dtype == torch.float8_e8m0fnu,
            SWIZZLED=swizzled,
            GLOBAL=global_scale is not None,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit
def unswizzle_kernel(
    swizzled_ptr, out_ptr, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One byte per block scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    at = scale_offset(row, column, num_columns, (num_columns + 3) // 4, True)
    scales = tl.load(swizzled_ptr + at, inside, 0)
    tl.store(out_ptr + row * num_columns + column, scales, inside)


def unswizzle(swizzled: Tensor, shape: tuple[int, int]) -> Tensor:
    """Plain block scales [R, B] = `shape` from those that `quant.layout.swizzle_scales` gives.

    Raises:
        ValueError: a device that the kernel was not written for.
    """
    target_of(swizzled.device)
    rows, columns = shape
    out = torch.empty(shape, dtype=swizzled.dtype, device=swizzled.device)
    if out.numel():
        grid = (triton.cdiv(rows, 128), triton.cdiv(columns, 32))
        unswizzle_kernel[grid](
            swizzled.view(torch.uint8),
            out.view(torch.uint8),
            rows,
            columns,
            ROWS=128,
            COLUMNS=32,
            num_warps=NUM_WARPS,
        )
    return out
