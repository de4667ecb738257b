"""What one thread holds in registers: 32-bit words of two BF16, and blocks of 16 FP32 values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def registers(outputs, inputs):
    """Constraints of inline PTX whose operands are all 32-bit registers."""
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@triton.jit
def unpack(word):
    """The low and the high BF16 of int32 words, as FP32."""
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def split4(v):
    """A tensor of a last dimension of four, as a tuple of four."""
    even, odd = tl.split(tl.reshape(v, v.shape[:-1] + (2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def load4(ptr, tokens, t):
    """Four words of token t from each thread's pointers, zeros from `tokens` on."""
    return split4(tl.load(ptr, t < tokens, 0))


@triton.jit
def stack(values, LEVELS: tl.constexpr):
    """A tuple of 2^LEVELS tensors as one, whose last dimension counts them."""
    shape: tl.constexpr = values[0].shape
    for level in tl.static_range(LEVELS):
        joined = ()
        for i in tl.static_range(1 << (LEVELS - 1 - level)):
            joined = joined + (tl.join(values[i], values[i + (1 << (LEVELS - 1 - level))]),)
        values = joined
    return tl.reshape(values[0], shape + (1 << LEVELS,))


@triton.constexpr_function
def amax16_ptx(target: int) -> str:
    """PTX of `amax16`: $0 the result, $1..$16 the values. `max` passes over NaN."""
    if target >= 100:  # three operands and their magnitudes in one instruction
        first = "max.abs.f32 $0, $1, $2, 0f00000000;"
        return " ".join([first, *(f"max.abs.f32 $0, $0, ${i}, ${i + 1};" for i in range(3, 17, 2))])
    lines = ["{ .reg .b32 a; mov.b32 $0, 0;"]
    lines += [f"abs.f32 a, ${i}; max.f32 $0, $0, a;" for i in range(1, 17)]
    return " ".join([*lines, "}"])


@triton.jit
def amax16(values, TARGET: tl.constexpr):
    """Largest magnitude of a tuple of 16 FP32 tensors, passing over NaN."""
    if TARGET > 0:
        return tl.inline_asm_elementwise(
            amax16_ptx(TARGET),
            registers(1, 16),
            values,
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    magnitude = tl.abs(stack(values, 4))
    return tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), len(values[0].shape))


@triton.constexpr_function
def row_stats_ptx(target: int, from_words: bool) -> str:
    """PTX of `row_stats`: $0 and $1 the results, then eight words, or eight FP32.

    Zero times a value is NaN where that is NaN or infinite, and stays NaN in a sum.
    """
    if not from_words:
        lines = ["{ .reg .b32 a, f; mov.b32 $0, 0; mov.b32 f, 0;"]
        for i in range(2, 10):
            lines.append(f"abs.f32 a, ${i}; max.f32 $0, $0, a; fma.rn.f32 f, a, 0f00000000, f;")
        return " ".join([*lines, "mov.b32 $1, f; }"])
    lines = ["{ .reg .b32 m, f, l, h; .reg .b32 zero; mov.b32 zero, 0; mov.b32 f, 0; mov.b32 m, 0;"]
    for i in range(2, 10):
        lines.append(f"max.xorsign.abs.bf16x2 m, m, ${i}; fma.rn.bf16x2 f, ${i}, zero, f;")
    lines.append("shl.b32 l, m, 16; and.b32 l, l, 0x7FFF0000; and.b32 h, m, 0x7FFF0000;")
    return " ".join([*lines, "max.f32 $0, l, h; and.b32 $1, f, 0x7FFF7FFF; }"])


@triton.jit
def row_stats(x, FROM_WORDS: tl.constexpr, TARGET: tl.constexpr):
    """Amax (FP32) of a tuple of eight words or FP32 tensors, and int32 that is 0 if all are finite.

    The amax passes over NaN.
    """
    if TARGET > 0:
        return tl.inline_asm_elementwise(
            row_stats_ptx(TARGET, FROM_WORDS),
            registers(2, 8),
            x,
            dtype=(tl.float32, tl.int32),
            is_pure=True,
            pack=1,
        )
    v = stack(x, 3)
    magnitude = tl.abs(v)
    if FROM_WORDS:
        low, high = unpack(v)
        magnitude = tl.join(tl.abs(low), tl.abs(high))
        magnitude = tl.reshape(magnitude, x[0].shape + (16,))
    amax = tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), len(x[0].shape))
    finite = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return amax, tl.max(tl.where(finite, 0, 1), len(x[0].shape))
