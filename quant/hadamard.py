"""The random Hadamard transform (RHT) that spreads outliers along the tokens before Wgrad.

Both operands of Wgrad are multiplied, in tiles along the token dimension, by one orthogonal matrix
`diag(signs) @ H / sqrt(size)`. It cancels in the product over tokens, and turns one large value
into `size` moderate ones, which lose less in 4 bits (arXiv 2509.25149).

Legend: T tokens, K features, S the tile's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu
from quant.backend import use_compiled

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The run's one sign vector (Transformer Engine's). Every rank must use the same."""

SIZES = (16, 32)


def resolve_signs(signs: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Signs of one tile: the given ones, or `SIGNS` repeated to `size`.

    Raises:
        ValueError: a size other than 16 or 32, or signs that are not `size` times +1 or -1.
    """
    if size not in SIZES:
        raise ValueError(f"the Hadamard tile must be one of {SIZES}, not {size}")
    resolved = SIGNS * (size // len(SIGNS)) if signs is None else tuple(int(s) for s in signs)
    if len(resolved) != size or any(abs(s) != 1 for s in resolved):
        raise ValueError(f"a Hadamard tile of {size} takes {size} signs of +1 or -1: {resolved}")
    return resolved


def padded_tokens(num_tokens: int, size: int) -> int:
    """Tokens after padding with zeros to whole tiles of `size`."""
    return -(-num_tokens // size) * size


def hadamard_tiles(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """FP32 [..., S] times `diag(signs) @ H / sqrt(S)`, H in Sylvester's natural order.

    The fast Walsh-Hadamard transform with strides 1, 2, 4, ... fixes the order of the sums: another
    order gives other bits once the exponents within a tile spread over 2^16.
    """
    size = len(signs)
    y = x * torch.tensor(signs, dtype=torch.float32, device=x.device)
    stride = 1
    while stride < size:
        pairs = y.unflatten(-1, (-1, 2, stride))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    return y * torch.tensor(1 / math.sqrt(size), dtype=torch.float32, device=x.device)


def rht_transpose(x_TK: Tensor, signs: Sequence[int] | None = None, size: int = 16) -> Tensor:
    """The RHT of `x_TK` along its tokens, transposed: ready for `quantize(..., NVFP4)`.

    Computed in FP32 in a fixed order and rounded to BF16, as in Transformer Engine: the amax of a
    column copy is that of the rounded result. Where T is not a multiple of `size` the last tile is
    filled with zero tokens and all its `size` outputs are kept, so that the product of two
    transformed tensors over the tokens stays that of the originals.

    Args:
        x_TK: BF16, FP16 or FP32, two dimensions, any strides.
        signs: `size` times +1 or -1; None takes `SIGNS` (twice for 32).
        size: tokens in a tile, 16 (NVFP4) or 32 (MXFP4).

    Returns:
        BF16 [K, ceil(T / size) * size], contiguous.

    Raises:
        ValueError: not two dimensions, an unknown size, or wrong signs.
    """
    if x_TK.dim() != 2:
        raise ValueError(f"rht_transpose takes [tokens, features], not {tuple(x_TK.shape)}")
    resolved = resolve_signs(signs, size)
    if use_compiled(x_TK):
        return cpu.rht_transpose(x_TK, resolved)[0]
    x_KT = functional.pad(x_TK.t().float(), (0, -x_TK.shape[0] % size))
    y_KT = hadamard_tiles(x_KT.unflatten(1, (-1, size)), resolved).flatten(1)
    return y_KT.to(torch.bfloat16)
