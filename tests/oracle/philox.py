"""Random bytes of stochastic rounding: Philox4x32-10 in Python integers.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

MASK = 0xFFFFFFFF
ACTIVATION, WEIGHT, GRADIENT = 0, 1, 2
ROW, COLUMN = 0, 1


@cache
def philox4x32_10(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Four 32-bit words of random bits for a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Key:
    """Names one tensor of one run. ``element`` counts its elements in row-major order."""

    seed: int
    step: int
    microbatch: int
    layer: int
    role: int
    copy: int

    def byte(self, element: int) -> int:
        """The random byte of one element: 16 neighbours share a call, little end first."""
        word = self.words(element // 16)[element % 16 // 4]
        return word >> 8 * (element % 4) & 0xFF

    def words(self, group: int) -> tuple[int, int, int, int]:
        """The 16 bytes of elements 16 * group .. 16 * group + 15."""
        name = self.layer << 8 | self.role << 4 | self.copy
        counter = (group, self.microbatch, self.step, name)
        return philox4x32_10(counter, (self.seed & MASK, self.seed >> 32))

    def bytes(self, rows: int, columns: int) -> np.ndarray:
        """``byte`` of all elements of a matrix, int64 [rows, columns]."""
        count = rows * columns
        groups = [self.words(group) for group in range(-(-count // 16))]
        words = np.array(groups, dtype="<u4").reshape(-1)
        return words.view(np.uint8)[:count].astype(np.int64).reshape(rows, columns)
