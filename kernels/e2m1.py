"""E2M1 codes from FP32 values: the hardware's conversions where a target has them, software else.

`encode8` is the only place that converts. TARGET is the compute capability times ten, or 0 in
Triton's interpreter, which cannot run PTX and takes the plain definition:

    RNE     `cvt.rn.satfinite.e2m1x2.f32` from sm_100 on, software on sm_90
    SR      `cvt.rs.satfinite.e2m1x4.f32` on sm_100a and sm_103a, software elsewhere

The tests run the PTX of every variant through an evaluator and compare it with the definition.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.words import registers, stack


@triton.constexpr_function
def rs_byte_order():
    """Which of our four random bytes goes to each byte of `cvt.rs`'s operand, lowest byte first.

    `cvt.rs...e2m1x4 d, {a, b, e, f}, r` rounds the pair (a, b) with the upper bytes of r's two
    halves and (e, f) with the lower ones. We pass elements (3, 2, 1, 0). That the first of a pair
    takes the upper half is an assumption: PTX does not say, and `kernels.burnin` checks it on a
    card.
    """
    return 0x3120


@triton.constexpr_function
def has_stochastic_convert(target: int) -> bool:
    """Whether the target rounds to E2M1 stochastically in hardware."""
    return target in (100, 103)


@triton.constexpr_function
def _scale(target: int) -> list[str]:
    """v0..v7 = x * first * second; adding +0 turns -0, which the codes must not show, into +0."""
    if target < 100:
        return [
            f"mul.rn.f32 v{i}, ${i + 1}, $9; fma.rn.f32 v{i}, v{i}, $10, 0f00000000;"
            for i in range(8)
        ]
    lines = [
        ".reg .b64 first, second, zero, y<4>;",
        "mov.b64 first, {$9, $9}; mov.b64 second, {$10, $10};",
        "mov.b64 zero, {0f00000000, 0f00000000};",
    ]
    for i in range(4):
        lines += [
            f"mov.b64 y{i}, {{${2 * i + 1}, ${2 * i + 2}}};",
            f"mul.rn.f32x2 y{i}, y{i}, first; fma.rn.f32x2 y{i}, y{i}, second, zero;",
            f"mov.b64 {{v{2 * i}, v{2 * i + 1}}}, y{i};",
        ]
    return lines


@triton.constexpr_function
def _nearest_hardware() -> list[str]:
    return [
        ".reg .b8 c<4>;",
        *(f"cvt.rn.satfinite.e2m1x2.f32 c{i}, v{2 * i + 1}, v{2 * i};" for i in range(4)),
        "mov.b32 $0, {c0, c1, c2, c3};",
    ]


@triton.constexpr_function
def _stochastic_hardware() -> list[str]:
    lines = [".reg .b16 h<2>; .reg .b32 r;"]
    for i in range(2):
        values = ", ".join(f"v{4 * i + j}" for j in (3, 2, 1, 0))
        lines += [
            f"prmt.b32 r, ${11 + i}, 0, {rs_byte_order():#x};",
            f"cvt.rs.satfinite.e2m1x4.f32 h{i}, {{{values}}}, r;",
        ]
    return [*lines, "mov.b32 $0, {h0, h1};"]


@triton.constexpr_function
def _software_nearest(i: int) -> str:
    """The code of v{i} in the lowest bits of c{i}, by the FP32 adder, which rounds to nearest.

    With e the exponent of the value, at least that of 1, the step is 2^(e - 1), and the code is
    the number of steps plus 2e. The adder is given 2^(e + 22), whose last place is that step.
    Three bits are kept, so what is a multiple of eight drops out; the 2 brings the rest there.
    """
    return (
        f"abs.f32 a, v{i}; min.f32 a, a, 0f40C00000;"
        " max.s32 b, a, 0x3F800000; and.b32 b, b, 0x7F800000;"
        " add.s32 s, b, 0x0B000002; add.rn.f32 a, a, s;"
        f" shr.u32 b, b, 22; add.s32 c{i}, a, b;"
    )


@triton.constexpr_function
def _software_stochastic(i: int) -> str:
    """The code of v{i} in the lowest bits of the highest byte of c{i}.

    Times 2^-126, E2M1's subnormal numbers become those of FP32, and the code is what stands above
    bit 22. A product cut off, not rounded, leaves floor(256 frac) in the eight bits below it.
    """
    return (
        f"abs.f32 a, v{i}; min.f32 a, a, 0f40C00000; mul.rz.f32 a, a, 0f00800000;"
        f" prmt.b32 r, ${11 + i // 4}, 0, {0x4044 | (i % 4) << 8:#x}; mad.lo.u32 c{i}, a, 4, r;"
    )


@triton.constexpr_function
def _bytes_of(names: list[str], byte: int, target: str) -> str:
    """One byte of each of four registers."""
    pick = f"{0x40 + 0x11 * byte:#x}"
    return (
        f"prmt.b32 a, {names[0]}, {names[1]}, {pick}; prmt.b32 b, {names[2]}, {names[3]}, {pick};"
        f" prmt.b32 {target}, a, b, 0x5410;"
    )


@triton.constexpr_function
def _software(stochastic: bool) -> list[str]:
    """The word from c0..c7 and the signs of v0..v7: four elements at a time, a byte each."""
    convert, byte = (_software_stochastic, 3) if stochastic else (_software_nearest, 0)
    even, odd = (0, 2, 4, 6), (1, 3, 5, 7)
    return [
        ".reg .b32 a, b, r, s, e, o, c<8>;",
        *(convert(i) for i in even),
        _bytes_of([f"c{i}" for i in even], byte, "e"),
        _bytes_of([f"v{i}" for i in even], 3, "s"),
        "shr.u32 s, s, 4; lop3.b32 e, s, e, 0x08080808, 0xE4;",
        *(convert(i) for i in odd),
        _bytes_of([f"c{i}" for i in odd], byte, "o"),
        _bytes_of([f"v{i}" for i in odd], 3, "s"),
        "shl.b32 o, o, 4; lop3.b32 o, s, o, 0x80808080, 0xE4;",
        "lop3.b32 $0, e, o, 0x0F0F0F0F, 0xE4;",
    ]


@triton.constexpr_function
def encode8_ptx(target: int, stochastic: bool) -> str:
    """PTX of `encode8`: $0 the word, $1..$8 x, $9 and $10 the factors, $11 and $12 random words."""
    if not stochastic:
        convert = _nearest_hardware() if target >= 100 else _software(False)
    else:
        hardware = has_stochastic_convert(target)
        convert = _stochastic_hardware() if hardware else _software(True)
    return " ".join(["{ .reg .b32 v<8>;", *_scale(target), *convert, "}"])


@triton.jit
def round_nearest(y):
    """Code of FP32 y: nearest, ties to the even code, saturating; NaN gives +6, -0 gives 0."""
    a = tl.where(y == y, tl.minimum(tl.abs(y), 6.0), 6.0)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return tl.where(y < 0, code + 8, code)


@triton.jit
def round_stochastic(y, random):
    """Code of FP32 y, rounded up where floor(256 * frac) + random >= 256; random in [0, 256)."""
    a = tl.where(y == y, tl.minimum(tl.abs(y), 6.0), 6.0)
    position = tl.where(
        a < 2,
        (a * 512).to(tl.int32),
        tl.where(a < 4, (a * 256).to(tl.int32) + 512, (a * 128).to(tl.int32) + 1024),
    )
    code = (position + random) >> 8
    return tl.where(y < 0, code + 8, code)


@triton.jit
def encode8(x, first, second, random, STOCHASTIC: tl.constexpr, TARGET: tl.constexpr):
    """Eight codes of x * first * second, element i in nibble i.

    Args:
        x: tuple of eight FP32 tensors of one shape.
        first, second: FP32 tensors of that shape. The products are rounded one after the other.
        random: tuple of two uint32 tensors, byte i of which belongs to element i; not read where
            rounding is to nearest.

    Returns:
        int32.
    """
    if TARGET > 0:
        operands = x + (first, second)
        if STOCHASTIC:
            operands = operands + random
        return tl.inline_asm_elementwise(
            encode8_ptx(TARGET, STOCHASTIC),
            registers(1, 12 if STOCHASTIC else 10),
            operands,
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    y = (
        stack(x, 3)
        * tl.expand_dims(first, len(first.shape))
        * tl.expand_dims(second, len(first.shape))
    )
    if STOCHASTIC:
        words = tl.expand_dims(stack(random, 1), -1)
        bytes4 = (words >> (8 * tl.arange(0, 4)).to(tl.uint32)) & 0xFF
        codes = round_stochastic(y, tl.reshape(bytes4, y.shape).to(tl.int32))
    else:
        codes = round_nearest(y)
    for level in tl.static_range(3):
        low, high = tl.split(tl.reshape(codes, first.shape + (4 >> level, 2)))
        codes = low | (high << (4 << level))
    return tl.reshape(codes, first.shape)
