"""A weight in NVFP4 with one scale for 16 x 16, and its transpose, in one pass.

One thread owns one block: it finds the amax, converts the rows, and transposes the codes, which
cost less to move than values. Both copies hold the same values.

Legend: N features out, K features in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks import NUM_WARPS, block_words, grid, loads, own_block
from kernels.e2m1 import encode8
from kernels.matrix import BLOCK_SIZE, Copy, check_matrix
from kernels.nvfp4 import BLOCK, FIRST, block_scale, empty_scales, scale_offset
from kernels.target import target_of
from kernels.transpose import store_columns
from kernels.words import row_stats, split4, unpack


@triton.jit
def _load_row(ptr, inside4, LOADS: tl.constexpr):
    """16 features of one row: 8 words of two BF16 or 16 FP32."""
    row = ()
    for i in tl.static_range(LOADS):
        row = row + split4(tl.load(ptr + 4 * i, inside4))
    return row


@triton.jit
def quantize_weight_kernel(
    w_ptr,
    num_rows,
    num_columns,
    params_ptr,
    codes_ptr,
    scales_ptr,
    transposed_codes_ptr,
    transposed_scales_ptr,
    SWIZZLED: tl.constexpr,
    BF16: tl.constexpr,
    WARPS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """w_ptr: words of two BF16, or FP32. Codes: words of eight."""
    n_block, k_block = own_block(WARPS)
    n_blocks, k_blocks = num_rows // 16, num_columns // 16
    inside = (k_block < k_blocks) & (n_block < n_blocks)
    inside4 = inside[:, :, :, None]
    LOADS: tl.constexpr = loads(BF16)
    ptr, row_words = block_words(w_ptr, n_block, k_block, k_blocks, BF16)
    amax = tl.zeros([WARPS, 8, 4], tl.float32)
    for row in tl.static_range(16):
        w = _load_row(ptr + row * row_words, inside4, LOADS)
        amax = tl.maximum(amax, row_stats(w[:8], BF16, TARGET)[0])
        if not BF16:
            amax = tl.maximum(amax, row_stats(w[8:], BF16, TARGET)[0])
    block, global_first = tl.load(params_ptr + BLOCK), tl.load(params_ptr + FIRST)
    scale, first, second = block_scale(amax, params_ptr, block, global_first, TARGET)

    low, high = (), ()
    out = (codes_ptr + (n_block * 16 * k_blocks + k_block) * 2)[:, :, :, None]
    out = out + tl.arange(0, 2)[None, None, None, :]
    for row in tl.static_range(16):
        w = _load_row(ptr + row * row_words, inside4, LOADS)
        if BF16:
            values = ()
            for i in tl.static_range(8):
                values = values + unpack(w[i])
        else:
            values = w
        low = low + (encode8(values[:8], first, second, (0, 0), False, TARGET),)
        high = high + (encode8(values[8:], first, second, (0, 0), False, TARGET),)
        tl.store(out, tl.join(low[row], high[row]), inside4)
        out += k_blocks * 2
    transposed_codes_ptr += (k_block * 16 * n_blocks + n_block) * 2
    store_columns(transposed_codes_ptr, n_blocks * 2, low, high, inside, TARGET)

    scale = tl.where(inside, scale, 0).to(tl.uint8)
    k_tiles, n_tiles = (k_blocks + 3) // 4, (n_blocks + 3) // 4
    mask, transposed_mask = inside, inside
    if SWIZZLED:
        mask = (n_block < (n_blocks + 7) // 8 * 8) & (k_block < k_tiles * 4)
        transposed_mask = (k_block < (k_blocks + 7) // 8 * 8) & (n_block < n_tiles * 4)
    scales_ptr += scale_offset(n_block * 16, k_block, k_blocks, k_tiles, SWIZZLED)
    transposed_scales_ptr += scale_offset(k_block * 16, n_block, n_blocks, n_tiles, SWIZZLED)
    for i in tl.static_range(16):
        tl.store(scales_ptr + i * (16 if SWIZZLED else k_blocks), scale, mask)
        at = transposed_scales_ptr + i * (16 if SWIZZLED else n_blocks)
        tl.store(at, scale, transposed_mask)


def quantize_weight(w_NK: Tensor, params: Tensor, *, swizzled: bool = False) -> tuple[Copy, Copy]:
    """The NVFP4 copies of a weight with 16 x 16 scales: [N, K] for Fprop, [K, N] for Dgrad.

    Args:
        w_NK: BF16 or FP32, N and K multiples of 16.
        params: the weight's, of `global_scales`.
        swizzled: the layout of the block scales.

    Raises:
        ValueError: a matrix or a device that the kernel does not take.
    """
    w = check_matrix(w_NK, "quantize_weight")
    rows, columns = w.shape
    if rows % BLOCK_SIZE:
        raise ValueError(
            f"quantize_weight takes a multiple of {BLOCK_SIZE} rows, not {rows}: quantize with "
            "plain torch"
        )
    copies = [
        Copy(
            torch.empty(r, c // 2, dtype=torch.uint8, device=w.device),
            empty_scales(r, c // BLOCK_SIZE, swizzled, w.device),
        )
        for r, c in ((rows, columns), (columns, rows))
    ]
    if w.numel():
        bf16 = w.dtype == torch.bfloat16
        quantize_weight_kernel[grid(rows, columns)](
            w.view(torch.int32) if bf16 else w,
            rows,
            columns,
            params,
            *(
                part
                for c in copies
                for part in (c.codes.view(torch.int32), c.scales.view(torch.uint8))
            ),
            SWIZZLED=swizzled,
            BF16=bf16,
            WARPS=NUM_WARPS,
            TARGET=target_of(w.device),
            num_warps=NUM_WARPS,
        )
    return copies[0], copies[1]
