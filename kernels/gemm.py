"""The GEMM of two block-scaled operands: on FP4 and FP8 tensor cores, or on BF16 ones.

Both operands lie along R, the dimension that is reduced, and their block scales are swizzled, as
the quantizers write them. One source serves NVFP4 (E4M3 scales of 16), MXFP4 and MXFP8 (E8M0 scales
of 32). Blackwell multiplies codes and scales (`tl.dot_scaled`). Elsewhere, with `decode`, a program
turns its tiles into BF16, which holds an element times its block scale exactly, and multiplies
these: the emulation of `quant.gemm`, without a BF16 copy of an operand in memory. The tensor
scales, the addition to an earlier result and the rounding of the output happen in the epilogue:

    C = A @ B.T * (scale of a * scale of b) [+ C]

A program works off every so many tiles of C, in an order in which neighbours in time share
operands in the cache. Every element of C is written once, by one program, and its sum has one
order: two runs give the same bits. Tiles that stick out need no masks, because the bulk copies read
zeros outside a tensor, which add nothing, and write nothing there.

Legend: M, N rows of the operands, R the reduced dimension.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.dequantize import e2m1_value, scale_value
from kernels.dispatch import Choice, shape_refusal
from kernels.operand import Operand, problem
from kernels.target import INTERPRETER, target_of


class Tiling(NamedTuple):
    """How a GEMM is cut up.

    Attributes:
        rows, columns: of C in one tile, multiples of 128.
        step_bytes: bytes of codes along R in one step; at least the elements of four block scales.
        stages: steps in flight.
        warps: warps that compute the epilogue, or everything.
        specialized: whether warps of their own copy and multiply (tcgen05 only).
        halvings: the tile is written in 2^halvings parts.
    """

    rows: int
    columns: int
    step_bytes: int
    stages: int
    warps: int
    specialized: bool
    halvings: int

    def step(self, operand: Operand) -> int:
        """Elements along R in one step."""
        elements = self.step_bytes * (2 if operand.element == "e2m1" else 1)
        return max(elements, 4 * operand.block)


_DATACENTER = (
    Tiling(128, 256, 128, 3, 8, True, 3),
    Tiling(128, 128, 128, 4, 4, True, 2),
    Tiling(128, 256, 128, 3, 8, False, 3),
    Tiling(128, 128, 128, 4, 8, False, 1),
)
_WORKSTATION = (Tiling(128, 128, 128, 2, 8, False, 1),)
_DECODE = (
    Tiling(128, 128, 64, 3, 8, False, 1),
    Tiling(128, 256, 32, 4, 8, False, 2),
)
_DATACENTER_DECODE = (Tiling(128, 128, 32, 3, 8, False, 1),)
_WORKSTATION_DECODE = (Tiling(128, 128, 32, 2, 8, False, 1),)
_INTERPRETER = (Tiling(128, 128, 128, 1, 1, False, 1), Tiling(128, 256, 128, 1, 1, False, 2))


def tilings(target: int, decode: bool) -> tuple[Tiling, ...]:
    """Those that a target can run, the default first; a tune measures them all."""
    if target == INTERPRETER:
        return _INTERPRETER
    if decode:
        return {90: _DECODE, 120: _WORKSTATION_DECODE}.get(target, _DATACENTER_DECODE)
    return _WORKSTATION if target == 120 else _DATACENTER


@triton.jit
def tile_position(tile, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column of a tile's first element: eight tiles down, then the next column of tiles."""
    GROUP: tl.constexpr = 8
    tiles_down, tiles_across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    in_group = GROUP * tiles_across
    first = tile // in_group * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    down = first + tile % in_group % height
    return down * ROWS, tile % in_group // height * COLUMNS


@triton.jit
def _scales(descriptor, row, step, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Block scales [ROWS, BLOCKS] of one step."""
    s = descriptor.load([row // 128, step * (BLOCKS // 4), 0, 0])
    s = tl.reshape(s, (ROWS // 128, BLOCKS // 4, 32, 4, 4))
    return tl.reshape(tl.trans(s, 0, 3, 2, 1, 4), (ROWS, BLOCKS))


@triton.jit
def _decoded(codes, scales, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """BF16 values, exact: an element times its block scale has at most 6 significant bits."""
    ROWS: tl.constexpr = codes.shape[0]
    if FORMAT == "e2m1":
        pairs = codes.to(tl.int32)
        values = tl.join(e2m1_value(pairs & 15), e2m1_value(pairs >> 4))
    else:
        values = codes.to(tl.float32)
    values = tl.reshape(values, (ROWS, scales.shape[1], BLOCK))
    values = values * scale_value(scales, BLOCK == 32)[:, :, None]
    return tl.reshape(values.to(tl.bfloat16), (ROWS, scales.shape[1] * BLOCK))


@triton.jit
def store_tile(total, factor, c, row, column, ACCUMULATE: tl.constexpr, HALVINGS: tl.constexpr):
    """Write `total * factor` in 2^HALVINGS parts, so that few registers and little memory do."""
    parts = (total,)
    WIDTH: tl.constexpr = total.shape[1]
    for level in tl.static_range(HALVINGS):
        halves = ()
        for i in tl.static_range(1 << level):
            pair = tl.reshape(parts[i], (total.shape[0], 2, WIDTH >> (level + 1)))
            halves = halves + tl.split(tl.trans(pair, 0, 2, 1))
        parts = halves
    for i in tl.static_range(1 << HALVINGS):
        part = parts[i] * factor
        at = [row, column + i * (WIDTH >> HALVINGS)]
        if ACCUMULATE:
            part += c.load(at)
        c.store(at, part.to(c.dtype))


@triton.jit
def gemm_kernel(
    a_codes,
    a_scales,
    b_codes,
    b_scales,
    c,
    a_global_ptr,
    b_global_ptr,
    num_rows,
    num_columns,
    num_steps,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    DECODE: tl.constexpr,
    GLOBAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    HALVINGS: tl.constexpr,
    STAGES: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """Codes, scales and C: tensor descriptors."""
    STEP_BYTES: tl.constexpr = STEP // 2 if FORMAT == "e2m1" else STEP
    BLOCKS: tl.constexpr = STEP // BLOCK
    num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_columns, COLUMNS)
    factor = 1.0
    if GLOBAL:
        factor = tl.load(a_global_ptr) * tl.load(b_global_ptr)
    for tile in tl.range(
        tl.program_id(0),
        num_tiles,
        tl.num_programs(0),
        flatten=SPECIALIZED,
        warp_specialize=SPECIALIZED,
        disallow_acc_multi_buffer=COLUMNS > 128,
    ):
        row, column = tile_position(tile, num_rows, num_columns, ROWS, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in tl.range(num_steps, num_stages=STAGES):
            a = a_codes.load([row, step * STEP_BYTES])
            b = b_codes.load([column, step * STEP_BYTES])
            sa = _scales(a_scales, row, step, ROWS, BLOCKS)
            sb = _scales(b_scales, column, step, COLUMNS, BLOCKS)
            if DECODE:
                b_NR = _decoded(b, sb, FORMAT, BLOCK)
                total = tl.dot(_decoded(a, sa, FORMAT, BLOCK), tl.trans(b_NR), total)
            else:
                total = tl.dot_scaled(a, sa, FORMAT, tl.trans(b), sb, FORMAT, total)
        store_tile(total, factor, c, row, column, ACCUMULATE, HALVINGS)


def _descriptors(
    operand: Operand, rows: int, step: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of the codes, and of the scales as [row tiles, column tiles, 2, 256] (a copy's limit)."""
    codes, scales = operand.codes, operand.scales
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    row_tiles = triton.cdiv(codes.shape[0], 128)
    assert scales.dim() == 1
    width = step // 2 if operand.element == "e2m1" else step
    blocks = step // operand.block
    return (
        TensorDescriptor.from_tensor(codes, [rows, width]),
        TensorDescriptor.from_tensor(
            scales.view(row_tiles, -1, 2, 256), [rows // 128, blocks // 4, 2, 256]
        ),
    )


@functools.cache
def _processors(device: torch.device) -> int:
    """Programs that run at the same time."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def gemm(
    a: Operand,
    b: Operand,
    *,
    decode: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
) -> Tensor:
    """`a @ b.T` [M, N], tensor scales applied, summed in FP32.

    Where one operand is longer along R than the other, its excess must be zeros.

    Args:
        a, b: operands of one format, both with a global scale or neither.
        decode: multiply BF16 values (any target) instead of codes (Blackwell only).
        out: where to put the result, contiguous, of type `dtype`; None for a new tensor.
        accumulate: add to what `out` holds (FP32).
        dtype: FP32 or BF16.
        tiling: one of `tilings`; None for the default.

    Raises:
        ValueError: a shape that the kernel does not take, or such a device.
    """
    target = target_of(a.codes.device)
    why = shape_refusal(problem(a, b), dtype.itemsize)
    if why is None and not decode and target not in (INTERPRETER, 100, 103, 120):
        why = f"sm_{target} has no FP4 tensor cores: decode"
    if why is not None:
        raise ValueError(f"gemm does not take {problem(a, b)}: {why}")
    rows, columns = a.codes.shape[0], b.codes.shape[0]
    if out is None:
        out = torch.empty(rows, columns, dtype=dtype, device=a.codes.device)
        accumulate = False
    assert (*out.shape, out.dtype, out.is_contiguous()) == (rows, columns, dtype, True)
    depth = min(a.depth, b.depth)
    if out.numel() == 0 or depth == 0:
        return out if accumulate else out.zero_()
    tiling = tiling or tilings(target, decode)[0]
    step = tiling.step(a)
    num_tiles = triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns)
    programs = min(_processors(out.device), num_tiles)
    with_global = a.global_scale is not None
    gemm_kernel[(programs,)](
        *_descriptors(a, tiling.rows, step),
        *_descriptors(b, tiling.columns, step),
        TensorDescriptor.from_tensor(out, [tiling.rows, tiling.columns >> tiling.halvings]),
        a.global_scale if with_global else out,
        b.global_scale if with_global else out,
        rows,
        columns,
        triton.cdiv(depth, step),
        FORMAT=a.element,
        BLOCK=a.block,
        DECODE=decode,
        GLOBAL=with_global,
        ACCUMULATE=accumulate,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        STEP=step,
        HALVINGS=tiling.halvings,
        STAGES=tiling.stages,
        SPECIALIZED=tiling.specialized,
        num_warps=tiling.warps,
    )
    return out


def gemm_of(a: Operand, b: Operand, choice: Choice, total: Tensor | None = None) -> Tensor:
    """`gemm` in FP32, added to `total` if that is given, as `kernels.dispatch` chose it."""
    decode = choice.kernel == "decode"
    tiling = tilings(target_of(a.codes.device), decode)[choice.tiling]
    return gemm(a, b, decode=decode, out=total, accumulate=total is not None, tiling=tiling)
