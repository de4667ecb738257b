"""Cutting elementwise work into pieces that stay in a CPU's cache.

A chain of elementwise passes over a large tensor is bound by memory; the same chain over one
piece after another reads memory once. On a GPU one piece is everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CACHE_ELEMENTS = 1 << 19
"""Elements of one tensor's piece: 2 MiB in FP32, of which a chain touches a few."""


def blocks(count: int, elements_each: int, device: torch.device) -> Iterator[slice]:
    """Slices over ``count`` items of ``elements_each`` elements that cover them in order."""
    size = max(1, CACHE_ELEMENTS // elements_each) if device.type == "cpu" else count
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
