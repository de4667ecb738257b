"""How codes and block scales lie in memory: nibble packing and the tensor cores' scale layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu
from quant.backend import use_compiled, use_triton

TILE_ROWS, TILE_COLUMNS = 128, 4
"""Block scales are stored in tiles of 128 x 4; a tile is 512 consecutive scales."""


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] in [0, 16) to bytes [..., K/2]; the even element is the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes [..., K/2] to uint8 codes [..., K] in [0, 16); inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def transpose_nibbles(packed_RK: Tensor) -> Tensor:
    """Packed codes [R, K/2] as those of the transposed matrix [K, R/2]; R even."""
    if use_compiled(packed_RK):
        return cpu.transpose_codes(packed_RK)
    if use_triton(packed_RK) and not any(
        size % 16 for size in (len(packed_RK), 2 * packed_RK.shape[1])
    ):
        from kernels.transpose import transpose_codes

        return transpose_codes(packed_RK)
    return pack_nibbles(unpack_nibbles(packed_RK).t().contiguous())


def swizzle_scales(scales_MB: Tensor) -> Tensor:
    """Block scales [M, B] in the order that Blackwell's tensor cores read (cuBLAS 32x4x4).

    M is padded to a multiple of 128 and B to a multiple of 4, with zero bytes. The scale of
    (row, column) goes to byte `((rb * ncb + cb) * 32 + row % 32) * 16 + ((row % 128) // 32) * 4 +
    column % 4`, where rb = row // 128, cb = column // 4 and ncb is the number of column tiles.

    Args:
        scales_MB: one-byte type, two dimensions.

    Returns:
        the same type, flat, of roundup(M, 128) * roundup(B, 4) scales.

    Raises:
        ValueError: not two dimensions, or a type wider than one byte.
    """
    if scales_MB.dim() != 2 or scales_MB.element_size() != 1:
        raise ValueError(
            f"swizzle_scales takes one-byte scales of 2 dimensions, not {scales_MB.dtype} "
            f"{tuple(scales_MB.shape)}; flatten the leading dimensions first"
        )
    rows, columns = scales_MB.shape
    padding = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    padded = functional.pad(scales_MB.contiguous().view(torch.uint8), padding)
    tiles_down, tiles_across = padded.shape[0] // TILE_ROWS, padded.shape[1] // TILE_COLUMNS
    tiles = padded.view(tiles_down, 4, 32, tiles_across, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales_MB.dtype)


def unswizzle_scales(swizzled: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inverse of `swizzle_scales`: the plain block scales [M, B] = `shape`, padding dropped.

    Raises:
        ValueError: the size is not that of swizzled scales of `shape`.
    """
    rows, columns = shape
    row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    expected = row_tiles * column_tiles * TILE_ROWS * TILE_COLUMNS
    if swizzled.numel() != expected:
        raise ValueError(
            f"swizzled scales of {shape} hold {expected} values with their padding, "
            f"but {swizzled.numel()} were given"
        )
    tiles = swizzled.view(torch.uint8).view(row_tiles, column_tiles, 32, 4, TILE_COLUMNS)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, -1)
    return plain[:rows, :columns].contiguous().view(swizzled.dtype)


def e8m0_of_fp8_blocks(scales_MB: Tensor, columns: int) -> Tensor:
    """FP32 powers of two, one for 128 columns, as MXFP8 has them: E8M0, one for 32. Exact.

    An element's value does not change, so tensor cores multiply FP8 blocks as MXFP8.

    Args:
        scales_MB: FP32 powers of two from 2^-126 on.
        columns: K, elements in a row.

    Returns:
        float8_e8m0fnu [M, ceil(K / 32)].
    """
    exponents = (scales_MB.view(torch.int32) >> 23).to(torch.uint8)
    repeated = exponents.repeat_interleave(4, dim=1)[:, : -(-columns // 32)]
    return repeated.contiguous().view(torch.float8_e8m0fnu)


def fp8_blocks_of_e8m0(scales_MB: Tensor) -> Tensor:
    """Inverse of `e8m0_of_fp8_blocks`."""
    return (scales_MB.view(torch.uint8)[:, ::4].to(torch.int32) << 23).view(torch.float32)
