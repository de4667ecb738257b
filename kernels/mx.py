"""MXFP4 and MXFP8: a power-of-two scale for 32 elements, and no global scale.

A row copy has its blocks along the features, a column copy along the tokens and is stored
transposed. Each is a launch of its own: no amax of the whole tensor is needed.

Legend: T tokens, K features, L lines (rows of the copy), D the dimension along which blocks lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.e2m1 import encode8
from kernels.hadamard import NO_TRANSFORM, sign_bits, transform_rows
from kernels.matrix import MAX_COLUMNS, Copy, check_matrix
from kernels.nvfp4 import FLOAT_MAX, scale_offset
from kernels.philox import NO_KEY, key_words, random_words
from kernels.target import target_of
from kernels.words import split4

BLOCK = 32
TILE = 64
"""Lines, and elements along D, of one program."""
NUM_WARPS = 4


@triton.jit
def power_of_two_scale(amax, E2M1: tl.constexpr, UP: tl.constexpr):
    """Biased exponent of a block's scale, and one over the scale.

    The largest element is 1.5 x 2^2 (E2M1) or 1.75 x 2^8 (E4M3). Rounding up, an amax whose
    mantissa is larger takes the next power of two.
    """
    bits = tl.minimum(amax, FLOAT_MAX).to(tl.int32, bitcast=True)
    if UP:
        bits += 0x3FFFFF if E2M1 else 0x1FFFFF
    biased = tl.maximum((bits >> 23) - (2 if E2M1 else 8), 0)
    return biased, ((254 - biased) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _split8(v):
    """The last dimension of eight as a tuple of eight."""
    low, high = tl.split(tl.trans(tl.reshape(v, (v.shape[0], v.shape[1], 2, 4)), 0, 1, 3, 2))
    return split4(low) + split4(high)


@triton.jit
def quantize_mx_kernel(
    x_ptr,
    num_tokens,
    num_features,
    codes_ptr,
    scales_ptr,
    key,
    E2M1: tl.constexpr,
    COLUMN: tl.constexpr,
    UP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TILE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """x_ptr: BF16 or FP32. Codes: words of eight E2M1, or bytes of one E4M3."""
    BLOCKS: tl.constexpr = TILE // 32
    line_start, start = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    line = line_start + tl.arange(0, TILE)[:, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    if COLUMN:
        token = start + tl.arange(0, TILE)[:, None]
        feature = line_start + tl.arange(0, TILE)[None, :]
        num_lines, blocks = num_features, (num_tokens + 31) // 32
    else:
        token, feature = line, start + tl.arange(0, TILE)[None, :]
        num_lines, blocks = num_tokens, num_features // 32
    present = (token < num_tokens) & (feature < num_features)
    x = tl.load(x_ptr + (token.to(tl.int64) * num_features + feature), present, 0).to(tl.float32)
    if COLUMN:
        x = tl.trans(x)
    if SIGNS != -1:
        rows = tl.reshape(x, (TILE * BLOCKS, 32))
        x = tl.reshape(transform_rows(rows, SIGNS, 32, 5), (TILE, TILE))

    inside = (line < num_lines) & (block < blocks)
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude == magnitude, magnitude, 0.0)
    amax = tl.max(tl.reshape(magnitude, (TILE, BLOCKS, 32)), 2)
    biased, factor = power_of_two_scale(amax, E2M1, UP)
    at = scale_offset(line, block, blocks, (blocks + 3) // 4, SWIZZLED)
    scale_inside = inside
    if SWIZZLED:
        scale_inside = (line < (num_lines + 127) // 128 * 128) & (block < (blocks + 3) // 4 * 4)
    tl.store(scales_ptr + at, biased.to(tl.uint8), scale_inside)

    if E2M1:
        values = _split8(tl.reshape(x, (TILE, TILE // 8, 8)))
        factors = tl.reshape(
            tl.broadcast_to(factor[:, :, None], (TILE, BLOCKS, 4)), (TILE, 4 * BLOCKS)
        )
        words_inside = tl.reshape(
            tl.broadcast_to(inside[:, :, None], (TILE, BLOCKS, 4)), (TILE, 4 * BLOCKS)
        )
        column = start // 8 + tl.arange(0, 4 * BLOCKS)[None, :]
        random = (0, 0)
        if STOCHASTIC:
            # One call serves two words; both make it.
            r = random_words(line * (blocks * 2) + column // 2, key, TARGET)
            odd = (column % 2 + tl.zeros_like(line)) != 0
            random = (tl.where(odd, r[2], r[0]), tl.where(odd, r[3], r[1]))
        one = tl.full((TILE, 4 * BLOCKS), 1.0, tl.float32)
        words = encode8(values, factors, one, random, STOCHASTIC, TARGET)
        tl.store(codes_ptr + (line * (blocks * 4) + column), words, words_inside)
    else:
        y = tl.reshape(x, (TILE, BLOCKS, 32)) * factor[:, :, None]
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -448.0), 448.0), y)
        codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        first = line.to(tl.int64) * (blocks * 32) + block * 32
        at = first[:, :, None] + tl.arange(0, 32)[None, None, :]
        tl.store(codes_ptr + at, codes, inside[:, :, None])


def quantize_mx(
    x_TK: Tensor,
    *,
    element: str,
    column: bool = False,
    round_up: bool = True,
    random: Sequence[int] | None = None,
    signs: Sequence[int] | None = None,
    swizzled: bool = False,
) -> Copy:
    """The row copy of a matrix, or its column copy, in MXFP4 or MXFP8.

    The tokens of a column copy are padded with zeros to a multiple of 32.

    Args:
        x_TK: BF16 or FP32, K a multiple of 32.
        element: "e2m1" or "e4m3".
        column: blocks along T, stored transposed; else along K.
        round_up: the scale to the next power of two, so that nothing clips; else OCP's floor.
        random: the two key words and three counter words of Philox for stochastic rounding (E2M1).
        signs: 32 times +1 or -1, for a Hadamard transform along the blocks.
        swizzled: the layout of the block scales.

    Raises:
        ValueError: a matrix or a device that the kernel does not take.
    """
    x = check_matrix(x_TK, "quantize_mx")
    tokens, features = x.shape
    if features % BLOCK:
        raise ValueError(
            f"quantize_mx takes a multiple of {BLOCK} columns, not {features}: pad them, or "
            "quantize with plain torch"
        )
    if column and tokens > MAX_COLUMNS:
        raise ValueError(f"quantize_mx takes up to {MAX_COLUMNS} tokens, not {tokens}: split x")
    assert element == "e2m1" or (element == "e4m3" and random is None)
    lines, depth = (features, -(-tokens // BLOCK) * BLOCK) if column else (tokens, features)
    bits = 4 if element == "e2m1" else 8
    codes = torch.empty(lines, depth * bits // 8, dtype=torch.uint8, device=x.device)
    shape: tuple[int, ...] = (lines, depth // BLOCK)
    if swizzled:
        shape = (-(-lines // 128) * 128 * (-(-depth // (4 * BLOCK)) * 4),)
    scales = torch.empty(shape, dtype=torch.float8_e8m0fnu, device=x.device)
    if x.numel():
        # Whole tiles of scales, where these are swizzled, have their padding written.
        padded_lines = -(-lines // 128) * 128 if swizzled else lines
        padded_depth = -(-depth // (4 * BLOCK)) * 4 * BLOCK if swizzled else depth
        grid = (triton.cdiv(padded_lines, TILE), triton.cdiv(padded_depth, TILE))
        quantize_mx_kernel[grid](
            x,
            tokens,
            features,
            codes.view(torch.int32) if element == "e2m1" else codes,
            scales.view(torch.uint8),
            NO_KEY if random is None else key_words(random),
            E2M1=element == "e2m1",
            COLUMN=column,
            UP=round_up,
            STOCHASTIC=random is not None,
            SIGNS=NO_TRANSFORM.value if signs is None else sign_bits(tuple(signs)),
            SWIZZLED=swizzled,
            TILE=TILE,
            TARGET=target_of(x.device),
            num_warps=NUM_WARPS,
        )
    return Copy(codes, scales)
