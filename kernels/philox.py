"""Philox4x32-10: the random bits of stochastic rounding, as `quant.rounding` defines them.

One call gives the 16 bytes of 16 neighbouring elements: element e takes byte e % 4 (little end
first) of word e // 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from kernels.words import registers

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)

NO_KEY = (0, 0, 0, 0, 0)


def round_keys(key: Sequence[int]) -> list[int]:
    """The two key words of each of the ten rounds, one after the other."""
    return [(key[word] + _weyl(r, word)) & 0xFFFFFFFF for r in range(10) for word in range(2)]


def key_words(random: Sequence[int]) -> tuple[int, ...]:
    """Five words in [0, 2^32) as the kernels' int32: one type, so that no key compiles anew."""
    assert len(random) == len(NO_KEY)
    return tuple(word - (1 << 32) if word >= 1 << 31 else word for word in random)


@triton.constexpr_function
def _weyl(r, word):
    """What round r adds to a key word."""
    return r * (0x9E3779B9, 0xBB67AE85)[word] & 0xFFFFFFFF


@triton.constexpr_function
def philox_ptx():
    """PTX of the ten rounds: $0..$3 the words, $4..$7 the counter, then the keys of each round.

    One wide multiplication a product: Triton's `umulhi` would cost two.
    """
    lines = [
        "{ .reg .b64 p, q; .reg .b32 h, l, m, n, c<4>;",
        *(f"mov.b32 c{i}, ${4 + i};" for i in range(4)),
    ]
    for r in range(10):
        lines += [
            "mul.wide.u32 p, c0, 0xD2511F53; mul.wide.u32 q, c2, 0xCD9E8D57;",
            "mov.b64 {l, h}, p; mov.b64 {n, m}, q;",
            f"xor.b32 c0, m, c1; xor.b32 c0, c0, ${8 + 2 * r};",
            f"xor.b32 c2, h, c3; xor.b32 c2, c2, ${9 + 2 * r};",
            "mov.b32 c1, n; mov.b32 c3, l;",
        ]
    return " ".join([*lines, *(f"mov.b32 $${i}, c{i};".replace("$$", "$") for i in range(4)), "}"])


@triton.jit
def _multiply(a, MULTIPLIER: tl.constexpr):
    """High and low word of the 64-bit product."""
    return tl.umulhi(a, MULTIPLIER), a * MULTIPLIER


@triton.jit
def random_words(group, key, TARGET: tl.constexpr):
    """Four words of 32 random bits for each group of 16 elements.

    Args:
        group: index of the element divided by 16, any integer type, below 2^32.
        key: int32, the two key words and the last three counter words; see `key_words`.
    """
    c0 = group.to(tl.uint32)
    k0, k1 = key[0].to(tl.uint32, bitcast=True), key[1].to(tl.uint32, bitcast=True)
    c1, c2 = key[2].to(tl.uint32, bitcast=True), key[3].to(tl.uint32, bitcast=True)
    c3 = key[4].to(tl.uint32, bitcast=True)
    if TARGET > 0:
        operands = (c0, c1, c2, c3)
        for r in tl.static_range(10):
            operands = operands + (k0 + _weyl(r, 0), k1 + _weyl(r, 1))
        return tl.inline_asm_elementwise(
            philox_ptx(),
            registers(4, 24),
            operands,
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    for r in tl.static_range(10):
        high0, low0 = _multiply(c0, _MULTIPLIER_0)
        high1, low1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1 = high1 ^ c1 ^ (k0 + _weyl(r, 0)), low1
        c2, c3 = high0 ^ c3 ^ (k1 + _weyl(r, 1)), low0
    return c0, c1, c2, c3
