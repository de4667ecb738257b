"""Oracles of the quantizers' arithmetic in exact rational numbers, independent of `quant`.

Numbers are `fractions.Fraction`, rounded by the definition of each format. Where millions are
wanted, the same is done on integers: FP32 products and quotients of short significands are exact
in int64 before they are rounded.
"""

from __future__ import annotations

import bisect
from fractions import Fraction

import numpy as np

E2M1 = tuple(Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6"))
E4M3 = tuple(
    Fraction(code & 7, 8 << 6)
    if code < 8
    else Fraction(8 + (code & 7), 8) * Fraction(2) ** (code // 8 - 7)
    for code in range(127)
)
FLOAT_MAX = Fraction(2) ** 128 - Fraction(2) ** 104


def fp32(value: Fraction) -> Fraction:
    """Nearest FP32 number of a non-negative rational, ties to even, subnormals included."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / step) * step  # Python rounds a Fraction's tie to even


def nearest_code(value: Fraction, table: tuple[Fraction, ...]) -> int:
    """Index of the value nearest to a non-negative rational, ties to even; saturates."""
    if value >= table[-1]:
        return len(table) - 1
    upper = bisect.bisect_right(table, value)
    below, above = value - table[upper - 1], table[upper] - value
    if below == above:
        return upper if upper % 2 == 0 else upper - 1
    return upper - 1 if below < above else upper


def ceil_log2(value: Fraction) -> int:
    """Smallest e with 2^e >= value > 0."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 1
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


def nvfp4_scalars(amax: Fraction) -> tuple[Fraction, Fraction, Fraction]:
    """S_enc, S_dec and the multiplier of a block's amax, for amax > 0."""
    encode = min(fp32(2688 / amax), Fraction(2) ** 126)
    return encode, fp32(1 / encode), fp32(encode * fp32(Fraction(1, 6)))


def nvfp4_encode_table(decode: Fraction) -> list[Fraction]:
    """What x is multiplied by, for every block scale byte; byte 0 gives FLOAT_MAX."""
    products = [fp32(value * decode) for value in E4M3]
    return [min(fp32(1 / p), FLOAT_MAX) if p else FLOAT_MAX for p in products]


class Short:
    """Positive numbers `mantissa * 2^exponent` with int64 mantissas, elementwise exact."""

    def __init__(self, mantissa: np.ndarray, exponent: np.ndarray) -> None:
        self.mantissa, self.exponent = np.broadcast_arrays(mantissa, exponent)

    @classmethod
    def of(cls, values: list[Fraction]) -> Short:
        """FP32 numbers given as fractions; their significands have 24 bits."""
        mantissas, exponents = [], []
        for value in values:
            shift = value.denominator.bit_length() - 1
            mantissa = value.numerator
            trailing = (mantissa & -mantissa).bit_length() - 1 if mantissa else 0
            mantissas.append(mantissa >> trailing)
            exponents.append(trailing - shift)
        return cls(np.array(mantissas, dtype=np.int64), np.array(exponents, dtype=np.int64))

    def __mul__(self, other: Short) -> Short:
        return Short(self.mantissa * other.mantissa, self.exponent + other.exponent)

    def __getitem__(self, index: np.ndarray) -> Short:
        return Short(self.mantissa[index], self.exponent[index])

    def rounded(self, bits: int) -> Short:
        """To `bits` significant bits, ties to even."""
        length = np.frexp(self.mantissa.astype(np.float64))[1].astype(np.int64)
        assert int(length.max(initial=0)) <= 52, "a double no longer tells the length"
        return self.multiple_of(self.exponent + np.maximum(length - bits, 0))

    def multiple_of(self, exponent: np.ndarray) -> Short:
        """To the nearest multiple of 2^exponent, ties to even."""
        shift = np.clip(exponent - self.exponent, 0, 62)
        quotient = self.mantissa >> shift
        rest = self.mantissa - (quotient << shift)
        half = np.where(shift > 0, np.left_shift(1, np.maximum(shift - 1, 0)), 1)
        quotient = quotient + ((rest > half) | ((rest == half) & (quotient & 1 == 1)))
        return Short(quotient, self.exponent + shift)

    def binade(self) -> np.ndarray:
        """floor(log2), for positive numbers."""
        return np.frexp(self.mantissa.astype(np.float64))[1] - 1 + self.exponent

    def code(self, mantissa_bits: int, lowest: int, largest: int) -> np.ndarray:
        """Index of the nearest number of a small float format, saturating at code `largest`."""
        binade = np.maximum(self.binade(), lowest)
        rounded = self.multiple_of(binade - mantissa_bits)
        # Rounding may have reached the next binade: the code is then continuous all the same.
        units = np.ldexp(
            rounded.mantissa.astype(np.float64), rounded.exponent - binade + mantissa_bits
        )
        code = units + (binade - lowest) * (1 << mantissa_bits)
        return np.minimum(code, largest).astype(np.int64)
