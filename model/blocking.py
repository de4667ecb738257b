"""Cutting elementwise work into pieces that stay in a CPU's cache.

A chain of elementwise passes over a large tensor is bound by memory; the same chain over one
piece after another reads memory once. On a GPU, and where torch.compile fuses the chain, one piece
is everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CACHE_ELEMENTS = 1 << 19
"""Elements of one tensor's piece: 2 MiB in FP32, of which a chain touches a few."""


def blocks(tensor: Tensor) -> Iterator[slice]:
    """Slices of the first dimension that cover ``tensor`` in order, a piece each."""
    count = tensor.shape[0]
    size = max(1, count)
    if tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        size = max(1, CACHE_ELEMENTS * count // max(1, tensor.numel()))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
