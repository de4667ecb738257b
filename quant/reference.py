"""Quantize and dequantize in plain torch: the bytes that every fast path must give.

`quant.quantize` says what is computed, and calls this where no kernel runs.

Legend: R rows, K columns (the dimension along which blocks lie), B blocks in a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu
from quant.backend import use_compiled
from quant.formats import Format
from quant.layout import pack_nibbles, unpack_nibbles
from quant.rounding import (
    RoundingKey,
    e2m1_values,
    random_bytes,
    round_e2m1,
    round_e2m1_stochastic,
    round_e4m3,
)

FLOAT_MAX = torch.finfo(torch.float32).max
ENCODE_SCALE_CAP = 2.0**126
"""Largest S_enc: above it S_dec would be an FP32 subnormal."""

UNBIASED_GUARD = 16 / 17
"""The E4M3 block scale rounds down by up to 1/17; the guard leaves that much room below 6."""


class GlobalScales(NamedTuple):
    """FP32 scalars of one tensor; see `quant.quantize`.

    Attributes:
        encode: S_enc.
        decode: S_dec.
        block: what a block's amax is multiplied by to give its scale, `S_enc * fp32(1/6)`.
        first: what x is multiplied by at first: 1, or S_enc where it is capped.
        rest: what is left of S_dec then: S_dec, or 1 where S_enc is capped.
    """

    encode: Tensor
    decode: Tensor
    block: Tensor
    first: Tensor
    rest: Tensor


def nvfp4_global_scales(amax: Tensor, *, guard: bool = False) -> GlobalScales:
    """Scales of a whole tensor from its amax (FP32 scalar), NVFP4 only.

    With `guard` the largest code is taken as 6 * 16/17, for stochastic rounding without bias.
    """

    def constant(value: float) -> Tensor:
        # A tensor on amax's device: torch multiplies by a reciprocal where it divides by a scalar.
        return torch.full_like(amax, value)

    largest = largest_code(guard)
    if use_compiled(amax):
        return GlobalScales(*cpu.global_scales(amax, largest_code=largest))
    encode = (constant(448 * largest) / amax).clamp(max=ENCODE_SCALE_CAP)
    encode = torch.where((amax == 0) | (encode == 0), constant(1), encode)
    decode = constant(1) / encode
    capped = encode == ENCODE_SCALE_CAP
    first = torch.where(capped, encode, constant(1))
    rest = torch.where(capped, constant(1), decode)
    return GlobalScales(encode, decode, encode * constant(1 / largest), first, rest)


def largest_code(guard: bool) -> float:
    """What the largest magnitude of a tensor becomes."""
    return 6 * UNBIASED_GUARD if guard else 6.0


def as_bytes(t: Tensor) -> Tensor:
    """One-byte types as uint8, which all of torch's operations accept."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def amax_along(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest magnitude along `dim`, passing over NaN; 0 where there is nothing."""
    magnitude = x.abs()
    magnitude = torch.where(magnitude.isnan(), 0.0, magnitude)
    return magnitude.amax(dim) if magnitude.numel() else magnitude.sum(dim)


def quantize(
    x_RK: Tensor,
    format: Format,
    amax: Tensor | None,
    guard: bool,
    key: RoundingKey | None,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, block scales and S_dec.

    amax: of the whole tensor, in a format with a global scale.
    key: of stochastic rounding; None rounds to nearest.
    """
    rows, columns = x_RK.shape
    global_scales = None
    if format.has_global_scale:
        assert amax is not None
        global_scales = nvfp4_global_scales(amax, guard=guard)
    decode = None if global_scales is None else global_scales.decode
    block_rows, block_columns = format.block
    padding = (0, -columns % block_columns, 0, -rows % block_rows)
    x = functional.pad(x_RK.float(), padding).unflatten(1, (-1, block_columns))
    x = x.unflatten(0, (-1, block_rows))  # [row blocks, block rows, B, block columns]
    block_amax = amax_along(x, (1, 3))[:, None, :, None]
    if global_scales is not None:
        scales, y = _scale_nvfp4(x, block_amax, global_scales)
    elif format.scale == "fp32" and format.scale_rounding == "nearest":
        scales, y = _scale_free(x, block_amax, format)
    else:
        scales, y = _scale_power_of_two(x, block_amax, format)
    y_RK = y.flatten(2).flatten(0, 1)[:rows, :columns]
    repeated = as_bytes(scales).expand(-1, block_rows, -1, 1).flatten(0, 1)[:rows, :, 0]
    scales_RB = repeated.contiguous().view(format.scale_dtype)
    if format.element == "e4m3":
        return round_e4m3(y_RK).view(torch.uint8), scales_RB, decode
    if key is None:
        return pack_nibbles(round_e2m1(y_RK)), scales_RB, decode
    random = random_bytes(key, offset, rows * columns, x_RK.device).view(rows, columns)
    return pack_nibbles(round_e2m1_stochastic(y_RK, random)), scales_RB, decode


def _scale_nvfp4(x: Tensor, amax: Tensor, scales: GlobalScales) -> tuple[Tensor, Tensor]:
    sf = round_e4m3((amax * scales.block).clamp(max=FLOAT_MAX))
    sf_decode = sf.float() * scales.rest
    encode = (torch.ones_like(sf_decode) / sf_decode).clamp(max=FLOAT_MAX)
    return sf, (x * scales.first) * encode


def _scale_power_of_two(x: Tensor, amax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """E8M0 scales; kept as FP32 where the format says so."""
    mantissa, exponent = torch.frexp(amax.clamp(max=FLOAT_MAX))
    largest, largest_exponent = math.frexp(format.element_max)
    exponent = exponent - largest_exponent
    if format.scale_rounding == "up":
        exponent = exponent + (mantissa > largest).int()
    lowest = -127 if format.scale == "e8m0" else -126
    exponent = torch.where(amax == 0, -127 if format.scale == "e8m0" else 0, exponent)
    biased = exponent.clamp(lowest, 127) + 127
    scales = biased.to(torch.uint8).view(torch.float8_e8m0fnu)
    inverse = (254 - biased).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scales.to(format.scale_dtype), x * inverse.float()


def _scale_free(x: Tensor, amax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """FP32 scales amax / 448, at least the smallest normal number; 1 for a block of zeros."""
    largest = torch.full_like(amax, format.element_max)
    scales = (amax.clamp(max=FLOAT_MAX) / largest).clamp(min=2.0**-126)
    scales = torch.where(amax == 0, 1.0, scales)
    return scales, x / scales


def dequantize(
    codes_RK: Tensor,
    scales_RB: Tensor,
    format: Format,
    columns: int,
    global_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As `quant.quantize.dequantize`, of plain scales."""
    if format.element == "e2m1":
        values = e2m1_values(unpack_nibbles(codes_RK))
    else:
        values = codes_RK.view(torch.float8_e4m3fn).float()
    scales = scales_RB.float().repeat_interleave(format.block[1], dim=1)[:, :columns]
    values = values * scales
    return (values if global_scale is None else values * global_scale).to(dtype)
