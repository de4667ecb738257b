"""Evaluates the inline PTX of the kernels on arrays, by the semantics of NVIDIA's PTX ISA.

Triton's interpreter cannot run PTX, so it runs plain twins; this shows that the twins and the PTX
agree. Registers hold uint32 or uint64 arrays; every instruction that the kernels use is below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

Registers = dict[str, np.ndarray]
_CANONICAL_NAN = np.uint32(0x7FFFFFFF)


def evaluate(ptx: str, inputs: Sequence[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Run PTX on operands `$outputs`, ... = `inputs` (uint32 arrays); returns `$0`, ...

    Raises:
        NotImplementedError: an instruction that is not known here.
    """
    registers: Registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for statement in ptx.strip().strip("{}").split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        operation, operands = statement.split(maxsplit=1)
        arguments = _arguments(operands)
        target, sources = arguments[0], arguments[1:]
        if operation == "mov.b64" and target.startswith("{"):
            pair = _read(registers, sources[0])
            low, high = _names(target)
            registers[low], registers[high] = _low(pair), _high(pair)
            continue
        values = [_read(registers, source) for source in sources]
        registers[target] = _apply(operation, values)
    return [registers[f"${i}"] for i in range(outputs)]


def _arguments(operands: str) -> list[str]:
    return [a.strip() for a in re.findall(r"\s*(\{[^}]*\}|[^,]+)", operands)]


def _names(braces: str) -> list[str]:
    return [name.strip() for name in braces.strip("{}").split(",")]


def _read(registers: Registers, source: str) -> np.ndarray:
    if source.startswith("{"):
        parts = [_read(registers, name) for name in _names(source)]
        return np.stack(np.broadcast_arrays(*parts))
    if source.startswith("0f"):
        return np.uint32(int(source[2:], 16))
    if source[0].isdigit():
        return np.uint32(int(source, 0))
    return registers[source]


def _low(pair: np.ndarray) -> np.ndarray:
    return (pair & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _high(pair: np.ndarray) -> np.ndarray:
    return (pair >> np.uint64(32)).astype(np.uint32)


def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def _float(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def _bits(value: np.ndarray) -> np.ndarray:
    """FP32 results as bits: every NaN of an arithmetic instruction is the canonical one."""
    value = np.asarray(value, np.float32)
    return np.where(np.isnan(value), _CANONICAL_NAN, value.view(np.uint32))


def _round(value: np.ndarray) -> np.ndarray:
    """Correct rounding to FP32 of a float64 that holds a result exactly."""
    return value.astype(np.float32)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Fused multiply-add, for the addends of the kernels: +0, or products small beside c.

    The product of two FP32 is exact in float64. Its sum with 0 is too; with another addend the
    kernels only need the sum of a value of at most 11 bits above the addend's last place.
    """
    product = _float(a).astype(np.float64) * _float(b).astype(np.float64)
    return product + _float(c).astype(np.float64)


def _toward_zero(value: np.ndarray) -> np.ndarray:
    nearest = value.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(value)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


def _bf16_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    def cast(bits: np.ndarray) -> np.ndarray:
        value = torch.from_numpy(np.ascontiguousarray(_float(bits))).to(torch.bfloat16)
        return value.view(torch.uint16).numpy().astype(np.uint32)

    return cast(low) | (cast(high) << np.uint32(16))


def _halves(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on FP32 as one on the two BF16 of a word."""

    def on_words(*words: np.ndarray) -> np.ndarray:
        words = np.broadcast_arrays(*(np.asarray(w, np.uint32) for w in words))
        low = operation(*(w << np.uint32(16) for w in words))
        high = operation(*(w & np.uint32(0xFFFF0000) for w in words))
        return _bf16_pair(high, low)

    return on_words


def _max_xorsign(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    sign = (a ^ b) & np.uint32(0x80000000)
    largest = np.fmax(np.abs(_float(a)), np.abs(_float(b)))
    return _bits(largest) ^ np.where(np.isnan(largest), np.uint32(0), sign)


def _e2m1(bits: np.ndarray) -> np.ndarray:
    """`cvt.rn.satfinite.e2m1`: nearest, ties to even; NaN gives +6, -0 gives code 8."""
    value = _float(bits)
    magnitude = np.where(np.isnan(value), 6.0, np.minimum(np.abs(value), 6.0)).astype(np.float64)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(magnitude[..., None] - values)
    nearest = distance == distance.min(-1, keepdims=True)
    even = nearest & (np.arange(8) % 2 == 0)
    code = np.where(even.any(-1), even.argmax(-1), nearest.argmax(-1)).astype(np.uint32)
    negative = np.signbit(value) & ~np.isnan(value)
    return code | np.where(negative, np.uint32(8), np.uint32(0))


def _e2m1_stochastic(bits: np.ndarray, random: np.ndarray) -> np.ndarray:
    """`cvt.rs.satfinite.e2m1` of one element: up where floor(256 frac) + its byte >= 256."""
    value = _float(bits)
    magnitude = np.where(np.isnan(value), 6.0, np.minimum(np.abs(value), 6.0)).astype(np.float64)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8])
    code = np.searchsorted(values, magnitude, side="right").astype(np.int64) - 1
    fraction = (magnitude - values[code]) / (values[code + 1] - values[code])
    up = np.floor(256 * fraction).astype(np.int64) + random.astype(np.int64) >= 256
    code = np.where(magnitude == 6, 7, code + up).astype(np.uint32)
    negative = np.signbit(value) & ~np.isnan(value)
    return code | np.where(negative, np.uint32(8), np.uint32(0))


def _cvt_rs(values: np.ndarray, random: np.ndarray) -> np.ndarray:
    """{a, b, e, f}: a in the highest nibble. The pair (a, b) takes the upper bytes of the halves
    of the random word, (e, f) the lower ones; the first of a pair the upper half."""
    byte_of = (3, 1, 2, 0)
    word = np.zeros_like(values[0])
    for i in range(4):
        byte = (random >> np.uint32(8 * byte_of[i])) & np.uint32(0xFF)
        word |= _e2m1_stochastic(values[i], byte) << np.uint32(4 * (3 - i))
    return word


def _e4m3(bits: np.ndarray) -> np.ndarray:
    value = torch.from_numpy(np.ascontiguousarray(_float(bits)))
    return (
        value.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)
    )


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = _join(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    word = np.zeros(np.shape(both), np.uint32)
    for i in range(4):
        byte = (int(selector) >> (4 * i)) & 7
        word = word | (
            ((both >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
        )
    return word


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    result = np.zeros(np.shape(a), np.uint32)
    for i in range(8):
        if int(table) >> i & 1:
            terms = [x if i >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result = result | (terms[0] & terms[1] & terms[2])
    return result


def _packed(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on FP32 as one on 64-bit pairs."""
    return lambda *pairs: _join(operation(*map(_low, pairs)), operation(*map(_high, pairs)))


def _mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _bits(_float(a) * _float(b))


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _bits(_float(a) + _float(b))


def _sub(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _bits(_float(a) - _float(b))


def _fma_nearest(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return _bits(_round(_fma(a, b, c)))


def _signed_max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32)).view(np.uint32)


_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add.rn.f32": _add,
    "sub.rn.f32": _sub,
    "mul.rn.f32": _mul,
    "mul.rz.f32": lambda a, b: _bits(_toward_zero(_fma(a, b, np.uint32(0)))),
    "fma.rn.f32": _fma_nearest,
    "fma.rz.f32": lambda a, b, c: _bits(_toward_zero(_fma(a, b, c))),
    "add.rn.f32x2": _packed(_add),
    "sub.rn.f32x2": _packed(_sub),
    "mul.rn.f32x2": _packed(_mul),
    "fma.rn.f32x2": _packed(_fma_nearest),
    "fma.rn.bf16x2": _halves(_fma_nearest),
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "min.f32": lambda a, b: _bits(np.fmin(_float(a), _float(b))),
    "max.f32": lambda a, b: _bits(np.fmax(_float(a), _float(b))),
    "max.abs.f32": lambda a, b, c: _bits(
        np.fmax(np.fmax(np.abs(_float(a)), np.abs(_float(b))), np.abs(_float(c)))
    ),
    "max.xorsign.abs.bf16x2": _halves(_max_xorsign),
    "max.s32": _signed_max,
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "bfe.u32": lambda a, start, count: (a >> start) & ((np.uint32(1) << count) - np.uint32(1)),
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * np.uint64(b),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "cvt.rn.bf16x2.f32": _bf16_pair,
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: _e4m3(low) | (_e4m3(high) << np.uint32(8)),
    "cvt.rn.satfinite.e2m1x2.f32": lambda high, low: _e2m1(low) | (_e2m1(high) << np.uint32(4)),
    "cvt.rs.satfinite.e2m1x4.f32": _cvt_rs,
}


def _apply(operation: str, values: list[np.ndarray]) -> np.ndarray:
    if operation == "mov.b64":
        return _join(values[0][0], values[0][1])
    if operation == "mov.b32":
        value = values[0]
        if np.ndim(value) and len(value) in (2, 4) and value.dtype == np.uint32 and value.ndim > 1:
            width = np.uint32(32 // len(value))
            return sum(part << (width * np.uint32(i)) for i, part in enumerate(value))
        return value
    if operation not in _OPERATIONS:
        raise NotImplementedError(operation)
    with np.errstate(all="ignore"):
        return _OPERATIONS[operation](*values)
