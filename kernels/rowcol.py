"""Row and column copy of one tensor in NVFP4, in one pass.

One thread owns 16 tokens x 16 features: 16 whole blocks of the row copy and, after the Hadamard
transform along its tokens, 16 whole blocks of the column copy. So no amax crosses threads, and one
Philox call serves one block.

Legend: T tokens, K features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks import (
    NUM_WARPS,
    block_words,
    grid,
    load_rows,
    loads,
    own_block,
    pair_of_columns,
)
from kernels.e2m1 import encode8
from kernels.hadamard import NO_TRANSFORM, sign_bits, transform
from kernels.matrix import BLOCK_SIZE, Copy, check_matrix
from kernels.nvfp4 import BLOCK, FIRST, block_scale, empty_scales, scale_offset
from kernels.philox import NO_KEY, key_words, random_words
from kernels.target import target_of
from kernels.words import amax16, load4, unpack

OFF, NEAREST, STOCHASTIC = 0, 1, 2
"""How a copy is rounded, or that there is none."""


@triton.jit
def _encode_block(
    values, params, params_ptr, group, key, STOCHASTIC: tl.constexpr, TARGET: tl.constexpr
):
    """16 values to the code of their scale and two words of codes."""
    amax = amax16(values, TARGET)
    scale, first, second = block_scale(amax, params_ptr, params[0], params[1], TARGET)
    random = (0, 0, 0, 0)
    if STOCHASTIC:
        random = random_words(group, key, TARGET)
    low = encode8(values[:8], first, second, random[:2], STOCHASTIC, TARGET)
    high = encode8(values[8:], first, second, random[2:], STOCHASTIC, TARGET)
    return scale, tl.join(low, high)


@triton.jit
def quantize_rowcol_kernel(
    x_ptr,
    num_rows,
    num_columns,
    row_params_ptr,
    row_codes_ptr,
    row_scales_ptr,
    row_key,
    col_params_ptr,
    col_codes_ptr,
    col_scales_ptr,
    col_key,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    SIGNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BF16: tl.constexpr,
    WARPS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """x_ptr: words of two BF16, or FP32. Codes: words of eight. ROW, COLUMN: 0 off, 1 RNE, 2 SR."""
    t_block, k_block = own_block(WARPS)
    token, feature = t_block * 16, k_block * 16
    k_blocks, t_blocks = num_columns // 16, (num_rows + 15) // 16
    tokens = tl.where(k_block < k_blocks, num_rows - token, 0)
    tokens4 = tokens[:, :, :, None]
    two = tl.arange(0, 2)[None, None, None, :]

    # A load takes 128 bits of one token: 8 BF16 or 4 FP32. Each copy loads x anew, the second from
    # the cache, as 256 elements do not fit in registers.
    x_ptr, row_words = block_words(x_ptr, t_block, k_block, k_blocks, BF16)
    LOADS: tl.constexpr = loads(BF16)

    if ROW > 0:
        params = tl.load(row_params_ptr + BLOCK), tl.load(row_params_ptr + FIRST)
        group = token * k_blocks + k_block
        codes_ptr = (row_codes_ptr + group * 2)[:, :, :, None] + two
        tiles = (k_blocks + 3) // 4
        scale_ptr = row_scales_ptr + scale_offset(token, k_block, k_blocks, tiles, SWIZZLED)
        for t in tl.static_range(16):
            values = ()
            for i in tl.static_range(LOADS):
                x = load4(x_ptr + (t * row_words + 4 * i), tokens4, t)
                if BF16:
                    values = values + unpack(x[0]) + unpack(x[1]) + unpack(x[2]) + unpack(x[3])
                else:
                    values = values + x
            scale, codes = _encode_block(
                values, params, row_params_ptr, group, row_key, ROW == 2, TARGET
            )
            tl.store(codes_ptr, codes, t < tokens4)
            tl.store(scale_ptr, scale, (k_block < tiles * 4) if SWIZZLED else (t < tokens))
            group += k_blocks
            codes_ptr += k_blocks * 2
            scale_ptr += 16 if SWIZZLED else k_blocks

    if COLUMN > 0:
        params = tl.load(col_params_ptr + BLOCK), tl.load(col_params_ptr + FIRST)
        group = feature * t_blocks + t_block
        codes_ptr = (col_codes_ptr + group * 2)[:, :, :, None] + two
        tiles = (t_blocks + 3) // 4
        scale_ptr = col_scales_ptr + scale_offset(feature, t_block, t_blocks, tiles, SWIZZLED)
        scale_mask = tokens > 0
        if SWIZZLED:
            scale_mask = (k_block < (k_blocks + 7) // 8 * 8) & (t_block < tiles * 4)
        for i in tl.static_range(LOADS):
            x = load_rows(x_ptr + 4 * i, row_words, tokens4)
            for pair in tl.static_range(8 // LOADS):
                column = transform(pair_of_columns(x, pair, BF16), BF16, SIGNS, TARGET)
                for odd in tl.static_range(2):
                    scale, codes = _encode_block(
                        column[odd::2], params, col_params_ptr, group, col_key, COLUMN == 2, TARGET
                    )
                    tl.store(codes_ptr, codes, tokens4 > 0)
                    tl.store(scale_ptr, scale, scale_mask)
                    group += t_blocks
                    codes_ptr += t_blocks * 2
                    scale_ptr += 16 if SWIZZLED else t_blocks


def quantize_rowcol(
    x_TK: Tensor,
    *,
    row_params: Tensor | None,
    column_params: Tensor | None,
    row_random: Sequence[int] | None = None,
    column_random: Sequence[int] | None = None,
    signs: Sequence[int] | None = None,
    swizzled: bool = False,
) -> tuple[Copy | None, Copy | None]:
    """The NVFP4 copies of a matrix: blocks along K, and transposed with blocks along T.

    Where T is not a multiple of 16, the column copy is padded with zero tokens.

    Args:
        x_TK: BF16 or FP32, K a multiple of 16.
        row_params, column_params: of `global_scales`, or None for no such copy.
        row_random, column_random: the two key words and three counter words of Philox for
            stochastic rounding, or None for rounding to nearest.
        signs: 16 times +1 or -1, for a Hadamard transform of the column copy; None for none.
        swizzled: the layout of the block scales.

    Raises:
        ValueError: a matrix or a device that the kernel does not take.
    """
    x = check_matrix(x_TK, "quantize_rowcol")
    tokens, features = x.shape
    padded = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
    row = _empty(x, tokens, features, swizzled) if row_params is not None else None
    column = _empty(x, features, padded, swizzled) if column_params is not None else None
    if x.numel() == 0:
        return row, column
    bf16 = x.dtype == torch.bfloat16
    quantize_rowcol_kernel[grid(tokens, features)](
        x.view(torch.int32) if bf16 else x,
        tokens,
        features,
        *_arguments(x, row, row_params, row_random),
        *_arguments(x, column, column_params, column_random),
        ROW=_rounding(row, row_random),
        COLUMN=_rounding(column, column_random),
        SIGNS=NO_TRANSFORM.value if signs is None else sign_bits(tuple(signs)),
        SWIZZLED=swizzled,
        BF16=bf16,
        WARPS=NUM_WARPS,
        TARGET=target_of(x.device),
        num_warps=NUM_WARPS,
    )
    return row, column


def _empty(x: Tensor, rows: int, columns: int, swizzled: bool) -> Copy:
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
    return Copy(codes, empty_scales(rows, columns // BLOCK_SIZE, swizzled, x.device))


def _rounding(copy: Copy | None, random: Sequence[int] | None) -> int:
    if copy is None:
        return OFF
    return NEAREST if random is None else STOCHASTIC


def _arguments(
    x: Tensor, copy: Copy | None, params: Tensor | None, random: Sequence[int] | None
) -> tuple:
    """A copy's pointers and key; x stands in for the pointers of one that is not made."""
    key = NO_KEY if random is None else key_words(random)
    if copy is None:
        return x, x, x, key
    return params, copy.codes.view(torch.int32), copy.scales.view(torch.uint8), key
