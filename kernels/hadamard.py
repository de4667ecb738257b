"""The random Hadamard transform of 16 tokens that one thread holds, in the reference's order.

Rounding is symmetric in the sign, so the transform's signs cost nothing: where the signs of two
summands differ, their sum and difference change places, and the first one's sign moves on to the
last factor. The bits stay those of `quant.hadamard`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from kernels.words import amax16, registers, stack, unpack

NO_TRANSFORM = tl.constexpr(-1)
"""In place of SIGNS: leave the tokens as they are."""


def sign_bits(signs: tuple[int, ...]) -> int:
    """Signs of +1 and -1 as the bits of SIGNS: bit t is set where the sign of token t is -1."""
    return sum(1 << t for t, sign in enumerate(signs) if sign < 0)


@triton.constexpr_function
def _inverse_root(size: int) -> float:
    return 1 / math.sqrt(size)


@triton.constexpr_function
def _subtracts(token: int, stage: int, signs: int) -> bool:
    """Whether output `token` of a stage is a difference.

    Before stage s a value carries the sign of the first token in its run of 2^s.
    """
    low, high = token & ~(1 << stage), token | (1 << stage)
    differ = (signs >> (low >> stage << stage) ^ signs >> (high >> stage << stage)) & 1
    return bool((token >> stage & 1) ^ differ)


@triton.constexpr_function
def _arithmetic(operation: str, target: str, a: str, b: str, packed: bool) -> str:
    if packed:
        return f"{operation}.rn.f32x2 {target}, {a}, {b};"
    return " ".join(f"{operation}.rn.f32 {target}{h}, {a}{h}, {b}{h};" for h in "lh")


@triton.constexpr_function
def _butterflies(target: int, signs: int, from_words: bool, first: int) -> list[str]:
    """PTX of the transform of a pair of columns up to FP32 a0 .. a15.

    From sm_100 on both columns are added at once, and a{t} is a 64-bit pair; before, a{t}l and
    a{t}h are the two.

    Args:
        first: number of the first input operand: 16 words of two BF16, or 32 FP32.
    """
    packed = target >= 100
    factor = "0fBE800000" if signs & 1 else "0f3E800000"
    lines = [".reg .b32 word, l, h;"]
    if packed:
        lines.append(f".reg .b64 a<16>, b<16>, f; mov.b64 f, {{{factor}, {factor}}};")
    else:
        names = ", ".join(f"{n}{t}{h}" for n in "ab" for t in range(16) for h in "lh")
        lines.append(f".reg .b32 {names}, fl, fh; mov.b32 fl, {factor}; mov.b32 fh, {factor};")
    for t in range(16):
        low, high = (f"${first + 2 * t}", f"${first + 1 + 2 * t}")
        if from_words:
            low, high = "l", "h"
            word = f"${first + t}"
            lines.append(f"shl.b32 l, {word}, 16; and.b32 h, {word}, 0xFFFF0000;")
        if packed:
            lines.append(f"mov.b64 a{t}, {{{low}, {high}}};")
        else:
            lines.append(f"mov.b32 a{t}l, {low}; mov.b32 a{t}h, {high};")
    source, result = "a", "b"
    for stage in range(4):
        for t in range(16):
            operation = "sub" if _subtracts(t, stage, signs) else "add"
            low, high = f"{source}{t & ~(1 << stage)}", f"{source}{t | (1 << stage)}"
            lines.append(_arithmetic(operation, f"{result}{t}", low, high, packed))
        source, result = result, source
    lines += [_arithmetic("mul", f"a{t}", f"a{t}", "f", packed) for t in range(16)]
    return lines


@triton.constexpr_function
def _round(t: int, target: int) -> str:
    """PTX that rounds token t of both columns to BF16, into `word`."""
    if target >= 100:
        return f"mov.b64 {{l, h}}, a{t}; cvt.rn.bf16x2.f32 word, h, l;"
    return f"cvt.rn.bf16x2.f32 word, a{t}h, a{t}l;"


@triton.constexpr_function
def transform_ptx(target: int, signs: int, from_words: bool) -> str:
    """PTX of `transform`: $0..$31 the results, then the inputs."""
    lines = ["{", *_butterflies(target, signs, from_words, 32)]
    for t in range(16):
        lines.append(_round(t, target))
        lines.append(f"shl.b32 ${2 * t}, word, 16; and.b32 ${2 * t + 1}, word, 0xFFFF0000;")
    return " ".join([*lines, "}"])


@triton.constexpr_function
def transform_amax_ptx(target: int, signs: int, from_words: bool) -> str:
    """PTX of `transform_amax`: $0 the result, then the inputs."""
    lines = ["{ .reg .b32 m; mov.b32 m, 0;", *_butterflies(target, signs, from_words, 1)]
    for t in range(16):
        lines.append(_round(t, target))
        lines.append("max.xorsign.abs.bf16x2 m, m, word;")
    lines.append("shl.b32 l, m, 16; and.b32 l, l, 0x7FFF0000; and.b32 h, m, 0x7FFF0000;")
    return " ".join([*lines, "max.f32 $0, l, h; }"])


@triton.constexpr_function
def _floats(count):
    return (tl.float32,) * count


@triton.jit
def transform_rows(x_RS, SIGNS: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """The definition: FP32 `x @ diag(signs) @ H / sqrt(SIZE)`, rounded to BF16, of FP32 rows.

    Args:
        SIZE: 2^LEVELS, the length of a row.
    """
    ROWS: tl.constexpr = x_RS.shape[0]
    negative = (SIGNS >> tl.arange(0, SIZE).to(tl.uint32)) & 1
    y = x_RS * (1 - 2 * negative.to(tl.float32))[None, :]
    for stage in tl.static_range(LEVELS):
        pairs = tl.reshape(y, (ROWS, SIZE >> (stage + 1), 2, 1 << stage))
        low, high = tl.split(tl.trans(pairs, 0, 1, 3, 2))
        pairs = tl.join(low + high, low - high)
        y = tl.reshape(tl.trans(pairs, 0, 1, 3, 2), (ROWS, SIZE))
    return (y * _inverse_root(SIZE)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _plain(x, SIGNS: tl.constexpr):
    """`transform_rows` of a tuple of 16 FP32 tensors."""
    y = stack(x, 4)
    rows = tl.reshape(y, (x[0].numel, 16))
    return tl.reshape(transform_rows(rows, SIGNS, 16, 4), y.shape)


@triton.jit
def _unstack(y):
    """The last dimension of 16 as a tuple of 16."""
    parts = (y,)
    for level in tl.static_range(4):
        halves = ()
        for i in tl.static_range(1 << level):
            pairs = tl.reshape(parts[i], y.shape[:-1] + (8 >> level, 2))
            halves = halves + (tl.split(pairs),)
        parts = ()
        for i in tl.static_range(1 << level):
            parts = parts + (halves[i][0],)
        for i in tl.static_range(1 << level):
            parts = parts + (halves[i][1],)
    squeezed = ()
    for i in tl.static_range(16):
        squeezed = squeezed + (tl.reshape(parts[i], y.shape[:-1]),)
    return squeezed


@triton.jit
def transform(tokens, FROM_WORDS: tl.constexpr, SIGNS: tl.constexpr, TARGET: tl.constexpr):
    """BF16 of `x @ diag(signs) @ H16 / 4` along 16 tokens, for a pair of columns, held in FP32.

    Args:
        tokens: tuple of 16 int32 tensors, each with a token's two BF16; or of 32 FP32 tensors.
        SIGNS: what `sign_bits` gives, or NO_TRANSFORM.

    Returns:
        tuple of 32 FP32 tensors: token 0 of the low column, of the high one, token 1, ...
    """
    if SIGNS >= 0 and TARGET > 0:
        return tl.inline_asm_elementwise(
            transform_ptx(TARGET, SIGNS, FROM_WORDS),
            registers(32, 16 if FROM_WORDS else 32),
            tokens,
            dtype=_floats(32),
            is_pure=True,
            pack=1,
        )
    x = tokens
    if FROM_WORDS:
        x = ()
        for t in tl.static_range(16):
            x = x + unpack(tokens[t])
    if SIGNS >= 0:
        low, high = _unstack(_plain(x[::2], SIGNS)), _unstack(_plain(x[1::2], SIGNS))
        x = ()
        for t in tl.static_range(16):
            x = x + (low[t], high[t])
    return x


@triton.jit
def transform_amax(tokens, FROM_WORDS: tl.constexpr, SIGNS: tl.constexpr, TARGET: tl.constexpr):
    """Largest magnitude (FP32) of what `transform` gives, passing over NaN."""
    if TARGET > 0:
        return tl.inline_asm_elementwise(
            transform_amax_ptx(TARGET, SIGNS, FROM_WORDS),
            registers(1, 16 if FROM_WORDS else 32),
            tokens,
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    y = transform(tokens, FROM_WORDS, SIGNS, TARGET)
    return tl.maximum(amax16(y[::2], TARGET), amax16(y[1::2], TARGET))
