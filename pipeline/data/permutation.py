"""Pseudo-random permutations of any range that need no memory: the k-th element is computed.

A Feistel network is a bijection of the numbers of b bits for any round function; walking a cycle
of it until it lands below n makes it a bijection of 0..n-1 (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). Its round function is the finalizer of SplitMix64 (Steele, Lea and
Flood, 2014). Nothing here is meant to be secret.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 0xFFFFFFFFFFFFFFFF


def seed_of(*parts: object) -> int:
    """A 64-bit seed that depends on every part; parts are told apart by type and border."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: a bijection of uint64 words that spreads every bit over all."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keyed(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit key for each number, any shape."""
    return mix(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed))


def permute(positions: NDArray[np.int64], keys: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Where the permutation of 0..size-1 chosen by each key sends each position [N] -> [N].

    Equal keys give one permutation. About `ROUNDS` vector operations, twice at most on average.
    """
    assert positions.shape == keys.shape
    bits = max(2, (size - 1).bit_length())
    words = _feistel(positions.astype(np.uint64), keys, bits)
    outside = np.flatnonzero(words >= size)
    while outside.size:
        words[outside] = _feistel(words[outside], keys[outside], bits)
        outside = outside[words[outside] >= size]
    return words.astype(np.int64)


def _feistel(words: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """A bijection of the numbers of `bits` bits; the halves may differ by one bit."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = words & low_mask, words >> low_bits
    for number in range(ROUNDS):
        tweak = keys + np.uint64((number + 1) * _GOLDEN & _MASK64)
        if number % 2:
            low ^= mix(high + tweak) & low_mask
        else:
            high ^= mix(low + tweak) & high_mask
    return (high << low_bits) | low
