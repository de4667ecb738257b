"""Transpose packed 4-bit codes: 16 x 16 of them in one thread's registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks import NUM_WARPS, grid, own_block
from kernels.matrix import BLOCK_SIZE, MAX_ELEMENTS
from kernels.target import target_of
from kernels.words import registers


@triton.constexpr_function
def transpose8_ptx() -> str:
    """PTX of `transpose8`: $0..$7 the results, $8..$15 the words.

    Nibbles change places within pairs of words one apart, bytes two apart, halves four apart.
    """
    lines = ["{ .reg .b32 s, a<8>, b<8>;"]
    for i in range(0, 8, 2):
        low, high = f"${8 + i}", f"${9 + i}"
        lines.append(f"shl.b32 s, {high}, 4; lop3.b32 a{i}, {low}, s, 0x0F0F0F0F, 0xE4;")
        lines.append(f"shr.u32 s, {low}, 4; lop3.b32 a{i + 1}, s, {high}, 0x0F0F0F0F, 0xE4;")
    for i in (0, 1, 4, 5):
        lines.append(f"prmt.b32 b{i}, a{i}, a{i + 2}, 0x6240;")
        lines.append(f"prmt.b32 b{i + 2}, a{i}, a{i + 2}, 0x7351;")
    for i in range(4):
        lines.append(f"prmt.b32 ${i}, b{i}, b{i + 4}, 0x5410;")
        lines.append(f"prmt.b32 ${i + 4}, b{i}, b{i + 4}, 0x7632;")
    return " ".join([*lines, "}"])


@triton.constexpr_function
def _words(count):
    return (tl.int32,) * count


@triton.jit
def transpose8(rows, TARGET: tl.constexpr):
    """A tuple of eight words, each a row of eight codes, as the eight columns."""
    if TARGET > 0:
        return tl.inline_asm_elementwise(
            transpose8_ptx(),
            registers(8, 8),
            rows,
            dtype=_words(8),
            is_pure=True,
            pack=1,
        )
    columns = ()
    for i in tl.static_range(8):
        column = (rows[0] >> (4 * i)) & 15
        for row in tl.static_range(1, 8):
            column = column | (((rows[row] >> (4 * i)) & 15) << (4 * row))
        columns = columns + (column,)
    return columns


@triton.jit
def transpose16(low, high, TARGET: tl.constexpr):
    """16 rows of 16 codes, as tuples of their low and high words, as 16 columns."""
    low0, low1 = transpose8(low[:8], TARGET), transpose8(low[8:], TARGET)
    high0, high1 = transpose8(high[:8], TARGET), transpose8(high[8:], TARGET)
    return low0 + high0, low1 + high1


@triton.jit
def store_columns(ptr, row_words, low, high, mask, TARGET: tl.constexpr):
    """Store the transpose of 16 x 16 codes, whose rows lie `row_words` apart."""
    low, high = transpose16(low, high, TARGET)
    ptr = ptr[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
    for i in tl.static_range(16):
        tl.store(ptr, tl.join(low[i], high[i]), mask[:, :, :, None])
        ptr += row_words


@triton.jit
def transpose_codes_kernel(
    codes_ptr,
    num_rows,
    num_columns,
    out_ptr,
    WARPS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Words of eight codes [R, K / 8] to [K, R / 8]."""
    r_block, k_block = own_block(WARPS)
    r_blocks, k_blocks = num_rows // 16, num_columns // 16
    inside = (k_block < k_blocks) & (r_block < r_blocks)
    ptr = codes_ptr + (r_block * 16 * k_blocks + k_block) * 2
    ptr = ptr[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
    low, high = (), ()
    for _ in tl.static_range(16):
        pair = tl.split(tl.load(ptr, inside[:, :, :, None]))
        low, high = low + (pair[0],), high + (pair[1],)
        ptr += k_blocks * 2
    out_ptr += (k_block * 16 * r_blocks + r_block) * 2
    store_columns(out_ptr, r_blocks * 2, low, high, inside, TARGET)


def transpose_codes(codes_RK: Tensor) -> Tensor:
    """Packed codes [R, K/2] as those of the transposed matrix [K, R/2].

    With one scale for 16 x 16 the transpose of a weight that was gathered as codes is exact: its
    block scales are the transposed grid.

    Args:
        codes_RK: uint8, R and K multiples of 16.

    Raises:
        ValueError: another type or shape, or a device that the kernel was not written for.
    """
    rows, half = codes_RK.shape
    if codes_RK.dtype != torch.uint8 or rows % BLOCK_SIZE or 2 * half % BLOCK_SIZE:
        raise ValueError(
            f"transpose_codes takes uint8 codes of multiples of {BLOCK_SIZE} rows and columns, not "
            f"{codes_RK.dtype} of {rows} x {2 * half}: transpose them with plain torch"
        )
    if 2 * codes_RK.numel() >= MAX_ELEMENTS:
        raise ValueError(f"transpose_codes takes fewer than 2^32 codes, not {2 * codes_RK.numel()}")
    codes = codes_RK.contiguous()
    out = torch.empty(2 * half, rows // 2, dtype=torch.uint8, device=codes.device)
    if codes.numel():
        transpose_codes_kernel[grid(rows, 2 * half)](
            codes.view(torch.int32),
            rows,
            2 * half,
            out.view(torch.int32),
            WARPS=NUM_WARPS,
            TARGET=target_of(codes.device),
            num_warps=NUM_WARPS,
        )
    return out
