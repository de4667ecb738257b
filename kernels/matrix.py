"""The matrices that the Triton kernels take and the copies that they give."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZE = 16
MAX_ELEMENTS = 1 << 32
"""Blocks are counted in 32 bits, and so are the codes' words."""
MAX_COLUMNS = 64 * 65535
"""A grid's second dimension has 16 bits; the narrowest tile is 64 wide."""


class Copy(NamedTuple):
    """Codes and block scales of one copy.

    Attributes:
        codes: uint8 [rows, columns / 2].
        scales: float8_e4m3fn [rows, columns / 16], or flat if swizzled, padded with zeros.
    """

    codes: Tensor
    scales: Tensor


def check_matrix(x: Tensor, name: str) -> Tensor:
    """`x` as the kernels read it: contiguous and aligned.

    Raises:
        ValueError: what they do not take.
    """
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} takes a BF16 or FP32 matrix, not {x.dtype} {tuple(x.shape)}")
    if x.shape[1] % BLOCK_SIZE:
        raise ValueError(
            f"{name} takes a multiple of {BLOCK_SIZE} columns, not {x.shape[1]}: pad them, or "
            "quantize with plain torch"
        )
    if x.numel() >= MAX_ELEMENTS:
        raise ValueError(f"{name} takes fewer than 2^32 elements, not {x.numel()}: split x")
    if x.shape[1] > MAX_COLUMNS:
        raise ValueError(f"{name} takes up to {MAX_COLUMNS} columns, not {x.shape[1]}: split x")
    x = x.detach().contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
