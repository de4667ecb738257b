"""Rounding of single numbers to BF16, E4M3, E2M1 and E8M0, from their definitions.

FP64 in and out: it holds every FP32 value and all the quotients by a power of two exactly.
"""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3_MAX = 448.0


def nearest(v: np.ndarray, mantissa_bits: int, smallest_exponent: int) -> np.ndarray:
    """To the nearest value of a binary format, ties to even; overflow is the caller's concern."""
    v = np.asarray(v, dtype=np.float64)
    _, exponent = np.frexp(v)  # |v| in [2^(exponent - 1), 2^exponent)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, smallest_exponent) - mantissa_bits)
    return np.rint(v / quantum) * quantum


def bf16(v: np.ndarray) -> np.ndarray:
    """To the nearest BF16 value."""
    return nearest(v, 7, -126)


def e4m3(v: np.ndarray) -> np.ndarray:
    """To the nearest E4M3 value, clamped to +-448 first."""
    return nearest(np.clip(v, -E4M3_MAX, E4M3_MAX), 3, -6)


def e4m3_byte(v: np.ndarray) -> np.ndarray:
    """The byte of an E4M3 value: sign, 4 exponent bits of bias 7, 3 mantissa bits."""
    magnitude = np.abs(v)
    _, exponent = np.frexp(magnitude)
    exponent = np.maximum(exponent - 1, -6)
    mantissa = magnitude * np.ldexp(1.0, 3 - exponent)  # 8..15, below 8 where subnormal
    byte = np.where(mantissa >= 8, (exponent + 7) * 8 + mantissa - 8, mantissa)
    return (byte + 128 * np.signbit(v)).astype(np.uint8)


def e2m1_nearest(a: np.ndarray) -> np.ndarray:
    """The code 0..7 of the magnitude nearest to ``a`` in [0, 6]; a tie goes to the even code."""
    code = np.zeros(np.shape(a), dtype=np.int64)
    for upper in range(1, 8):
        middle = (E2M1[upper - 1] + E2M1[upper]) / 2
        code += (a >= middle) if upper % 2 == 0 else (a > middle)
    return code


def e2m1_stochastic(a: np.ndarray, random: np.ndarray) -> np.ndarray:
    """A neighbouring code of ``a`` in [0, 6]: the upper one where floor(256 fraction) + random
    byte reaches 256."""
    lower = np.zeros(np.shape(a), dtype=np.int64)
    for code in range(1, 8):
        lower += a >= E2M1[code]
    step = E2M1[np.minimum(lower + 1, 7)] - E2M1[np.minimum(lower, 6)]
    fraction = (a - E2M1[lower]) / step
    return lower + (np.floor(256 * fraction) + random >= 256)


def e8m0_round_up(amax: np.ndarray) -> np.ndarray:
    """The exponent k in -127..127 of the smallest 2^k with amax <= 448 * 2^k."""
    mantissa, exponent = np.frexp(amax)  # 448 = 0.875 * 2^9
    k = exponent - 9 + (mantissa > 0.875)
    return np.where(amax == 0, -127, np.clip(k, -127, 127))
