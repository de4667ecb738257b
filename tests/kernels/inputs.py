"""Inputs that the kernels' tests share."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.rounding import Copy, Role, RoundingKey

ROW_KEY = RoundingKey(2**63 + 5, 2, 2**32 - 1, 70_000, Role.GRADIENT, Copy.ROW)
COLUMN_KEY = RoundingKey(2**63 + 5, 2, 2**32 - 1, 70_000, Role.GRADIENT, Copy.COLUMN)

KINDS = ("gaussian", "wide", "tiny", "zeros", "any bits")


def matrix(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A matrix of one of `KINDS`."""
    generator = torch.Generator().manual_seed(len(kind) + sum(shape))
    x = torch.randn(shape, generator=generator)
    if kind == "wide":  # past 786432, where products underflow to -0
        x *= torch.exp2(torch.randint(-100, 100, shape, generator=generator).float())
    if kind == "tiny":  # the global scale is capped
        x *= 1e-37
    if kind == "zeros":
        x[:, : shape[1] // 2] = 0
        x[::3] *= -0.0
    if kind == "any bits":
        raw = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64)
        x = raw.to(torch.int32).view(torch.float32)
    return x.to(dtype)


def inside_poison(x: Tensor) -> Tensor:
    """The same matrix at the start of memory whose rest is NaN, which a kernel must not read in."""
    rows, columns = x.shape
    memory = torch.full((rows + 130, columns), float("nan"), dtype=x.dtype)
    memory[:rows] = x
    return memory[:rows]


def words(key: RoundingKey) -> tuple[int, ...]:
    """A key as the kernels take it."""
    return (*key.words, *key.counter)


def raw(t: Tensor) -> Tensor:
    """Bytes, which compare without regard to NaN."""
    return t.contiguous().view(torch.uint8)
