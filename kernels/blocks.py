"""One thread, one block of 16 x 16 elements: how a matrix is dealt out, and read.

The lanes of a warp lie 8 x 4, over 128 rows and 64 columns, so that every load of the matrix and
every store of codes, transposed ones too, covers whole sectors of 32 bytes. The warps of a program
lie side by side.

Legend: W warps. A tensor [W, 8, 4] holds one element a thread; a matrix is read in words of 32
bits: two BF16, or one FP32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.words import load4

NUM_WARPS = 4
TILE_ROWS, TILE_COLUMNS = 128, 64 * NUM_WARPS
TILE_ELEMENTS = TILE_ROWS * TILE_COLUMNS


def grid(rows: int, columns: int) -> tuple[int, int]:
    """Programs that cover a matrix."""
    return triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS)


@triton.constexpr_function
def loads(bf16):
    """Loads of 128 bits that take 16 elements."""
    return 2 if bf16 else 4


@triton.jit
def own_block(WARPS: tl.constexpr):
    """Row and column, in blocks, of each thread's block: [1, 8, 1] and [W, 1, 4]."""
    row = tl.program_id(0) * 8 + tl.arange(0, 8)[None, :, None]
    column = (tl.program_id(1) * WARPS + tl.arange(0, WARPS)[:, None, None]) * 4
    return row, column + tl.arange(0, 4)[None, None, :]


@triton.jit
def block_words(ptr, row, column, num_columns, BF16: tl.constexpr):
    """Pointers [W, 8, 4, 4] to the first four words of each block; and the words of a row.

    Args:
        row, column: of `own_block`.
        num_columns: blocks in a row.
    """
    row_words = num_columns * (4 * loads(BF16))
    first = row.to(tl.int64) * 16 * row_words + column * (4 * loads(BF16))
    return (ptr + first)[:, :, :, None] + tl.arange(0, 4)[None, None, None, :], row_words


@triton.jit
def load_rows(ptr, row_words, rows):
    """A tuple of four words of each of 16 rows; zeros from row `rows` on."""
    x = ()
    for row in tl.static_range(16):
        x = x + (load4(ptr + row * row_words, rows, row),)
    return x


@triton.jit
def pair_of_columns(x, pair: tl.constexpr, BF16: tl.constexpr):
    """16 words of two BF16, or 32 FP32, of what `load_rows` gives, for `hadamard.transform`."""
    column = ()
    for row in tl.static_range(16):
        column = column + ((x[row][pair],) if BF16 else x[row][2 * pair : 2 * pair + 2])
    return column
