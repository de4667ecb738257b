"""What quantizing a tensor must know first, from one pass over it.

The amax of x, the amax of its Hadamard transform along the tokens (rounded to BF16, as the column
copy is quantized from it), and how many elements are NaN or infinite. A thread owns 16 x 16
elements.

Legend: T tokens, K features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from kernels.hadamard import NO_TRANSFORM, sign_bits, transform_amax
from kernels.matrix import check_matrix
from kernels.target import target_of
from kernels.words import row_stats


class Statistics(NamedTuple):
    """Of one matrix.

    Attributes:
        amax: FP32 [2]: of x, and of its transform (0 without one). NaN is passed over.
        nonfinite: int64 scalar, the number of NaN and infinite elements of x.
    """

    amax: Tensor
    nonfinite: Tensor


@triton.jit
def _whole_max(v):
    return tl.max(tl.reshape(v, (v.numel,)), 0)


@triton.jit
def amax_kernel(
    x_ptr,
    num_rows,
    num_columns,
    amax_ptr,
    nonfinite_ptr,
    SIGNS: tl.constexpr,
    BF16: tl.constexpr,
    WARPS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """x_ptr: words of two BF16, or FP32; amax_ptr: int32 bits of FP32 [2]. Both start at zero."""
    t_block, k_block = own_block(WARPS)
    k_blocks = num_columns // 16
    tokens = tl.where(k_block < k_blocks, num_rows - t_block * 16, 0)[:, :, :, None]
    ptr, row_words = block_words(x_ptr, t_block, k_block, k_blocks, BF16)
    LOADS: tl.constexpr = loads(BF16)
    amax_x = tl.zeros([WARPS, 8, 4], tl.float32)
    amax_y = tl.zeros([WARPS, 8, 4], tl.float32)
    flags = tl.zeros([WARPS, 8, 4], tl.int32)
    for i in tl.static_range(LOADS):
        x = load_rows(ptr + 4 * i, row_words, tokens)
        for t in tl.static_range(0, 16, 2):
            amax, flag = row_stats(x[t] + x[t + 1], BF16, TARGET)
            amax_x = tl.maximum(amax_x, amax)
            flags = flags | flag
        if SIGNS >= 0:
            for pair in tl.static_range(8 // LOADS):
                column = pair_of_columns(x, pair, BF16)
                amax_y = tl.maximum(amax_y, transform_amax(column, BF16, SIGNS, TARGET))

    tl.atomic_max(amax_ptr, _whole_max(amax_x).to(tl.int32, bitcast=True), sem="relaxed")
    if SIGNS >= 0:
        tl.atomic_max(amax_ptr + 1, _whole_max(amax_y).to(tl.int32, bitcast=True), sem="relaxed")
    if _whole_max(flags) != 0:
        # Rare: count by reading the tile again.
        count = tl.zeros([WARPS, 8, 4, 4], tl.int32)
        for row in range(16):
            for i in tl.static_range(LOADS):
                bits = tl.load(ptr + (row * row_words + 4 * i), row < tokens, 0)
                bits = bits.to(tl.int32, bitcast=True)
                if BF16:
                    count += ((bits & 0x7F80) == 0x7F80).to(tl.int32)
                    count += ((bits & 0x7F800000) == 0x7F800000).to(tl.int32)
                else:
                    count += ((bits & 0x7F800000) == 0x7F800000).to(tl.int32)
        total = tl.sum(tl.reshape(count, (count.numel,)), 0)
        tl.atomic_add(nonfinite_ptr, total.to(tl.int64), sem="relaxed")


def amax_and_nonfinite(x_TK: Tensor, signs: Sequence[int] | None = None) -> Statistics:
    """Amax and non-finite count of a matrix, and the amax of its transform if `signs` are given.

    Args:
        x_TK: BF16 or FP32, K a multiple of 16.
        signs: 16 times +1 or -1.

    Raises:
        ValueError: a matrix or a device that the kernel does not take.
    """
    x = check_matrix(x_TK, "amax_and_nonfinite")
    tokens, features = x.shape
    amax = torch.zeros(2, dtype=torch.float32, device=x.device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    if x.numel():
        bf16 = x.dtype == torch.bfloat16
        amax_kernel[grid(tokens, features)](
            x.view(torch.int32) if bf16 else x,
            tokens,
            features,
            amax.view(torch.int32),
            nonfinite,
            SIGNS=NO_TRANSFORM.value if signs is None else sign_bits(tuple(signs)),
            BF16=bf16,
            WARPS=NUM_WARPS,
            TARGET=target_of(x.device),
            num_warps=NUM_WARPS,
        )
    return Statistics(amax, nonfinite)
