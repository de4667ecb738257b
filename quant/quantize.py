"""Quantize a tensor to a block-scaled format, and back.

The order of operations decides the bytes: here they equal Transformer Engine's reference (NVFP4)
and torchao's (MX). All arithmetic is FP32, rounded to nearest even, and nothing is reassociated:

    S_enc = min(2688 / amax, 2^126);  1 where amax or S_enc is 0          (2688 = 6 * 448)
    S_dec = 1 / S_enc
    sf    = E4M3(min(block_amax * (S_enc * fp32(1/6)), FLT_MAX))
    enc   = min(1 / (sf * S_dec), FLT_MAX)
    code  = E2M1(clamp(x * enc, -6, 6))
    value = code * sf * S_dec

Where S_enc is capped (amax under about 3.2e-35), `x * S_enc` and `1 / sf` are formed apart because
`1 / (sf * S_dec)` would overflow; S_enc is then a power of two, so nothing else changes.

Legend: R rows, K columns (the dimension along which blocks lie), B blocks in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels import cpu
from quant import gpu, layout, reference
from quant.backend import use_compiled, use_triton
from quant.formats import Format
from quant.layout import transpose_nibbles
from quant.reference import amax_along, as_bytes, largest_code
from quant.rounding import RoundingKey, check_elements

Rounding = Literal["nearest", "stochastic"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in a block-scaled format.

    Attributes:
        codes: uint8 [..., K/2] with the even element in the low nibble, or [..., K] for 8 bits.
        scales: block scales in plain layout, [..., ceil(K / block)]: float8_e4m3fn (NVFP4),
            float8_e8m0fnu (MX) or float32 (FP8 blocks). The scale of a block that spans rows is
            repeated on each of them, so that one- and two-dimensional blocks look alike. Flat
            in the tensor cores' layout where `swizzled`.
        global_scale: FP32 scalar, the decode scale S_dec; None where the format has none.
        format: the format.
        shape: shape of the tensor that was quantized.
        swizzled: whether the scales, of a matrix then, are as `layout.swizzle_scales` gives them;
            those of FP8 blocks as MXFP8's, `layout.e8m0_of_fp8_blocks`.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: Format
    shape: torch.Size
    swizzled: bool = False

    def plain(self) -> QuantizedTensor:
        """The same tensor, its block scales in plain layout."""
        if not self.swizzled:
            return self
        fp8_blocks = self.format.scale == "fp32"
        blocks = -(-self.shape[1] // (32 if fp8_blocks else self.format.block[1]))
        scales = layout.unswizzle_scales(self.scales, (self.shape[0], blocks))
        if fp8_blocks:
            scales = layout.fp8_blocks_of_e8m0(scales)
        return replace(self, scales=scales, swizzled=False)

    def swizzle(self) -> QuantizedTensor:
        """The same matrix, its block scales as tensor cores read them.

        Raises:
            ValueError: scales that tensor cores do not read: free FP32 ones.
        """
        if self.swizzled:
            return self
        scales = self.scales
        if self.format.scale == "fp32" and self.format.scale_rounding == "up":
            scales = layout.e8m0_of_fp8_blocks(scales, self.shape[1])
        return replace(self, scales=layout.swizzle_scales(scales), swizzled=True)

    def dequantize(
        self, dtype: torch.dtype = torch.float32, *, global_scale: bool = True
    ) -> Tensor:
        """The values; see the function `dequantize`."""
        return dequantize(self, dtype, global_scale=global_scale)

    def transpose(self) -> QuantizedTensor:
        """The transposed matrix, exact: the same codes and scales in another order.

        Raises:
            ValueError: blocks of one row (the transpose needs another quantization), not a
                matrix, or an odd number of rows in a 4-bit format.
        """
        if not self.format.is_2d or len(self.shape) != 2:
            raise ValueError(
                f"only a matrix in a format of two-dimensional blocks transposes exactly, not "
                f"{self.format.name} {tuple(self.shape)}; quantize the transposed tensor instead"
            )
        if self.swizzled:
            return self.plain().transpose().swizzle()
        rows, columns = self.shape
        transposed = torch.Size((columns, rows))
        _check_packable(transposed, self.format)
        four_bits = self.format.element_bits == 4
        codes = transpose_nibbles(self.codes) if four_bits else self.codes.t().contiguous()
        block_rows, block_columns = self.format.block
        grid = as_bytes(self.scales)[::block_rows].t()
        scales = grid.repeat_interleave(block_columns, dim=0)[:columns].contiguous()
        return replace(
            self, codes=codes, scales=scales.view(self.format.scale_dtype), shape=transposed
        )

    @property
    def nbytes(self) -> int:
        """Bytes that codes and scales occupy."""
        parts = (self.codes, self.scales, self.global_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        global_scale = None if self.global_scale is None else self.global_scale.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, global_scale=global_scale)


def amax_and_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """`amax_of(x)` and `nonfinite_count(x)`, from one pass where there is a compiled one."""
    if use_compiled(x):
        return cpu.amax_and_nonfinite(x)
    x = x.detach()
    if x.dim() and use_triton(x) and gpu.accepts("amax", gpu.matrix_refusal(x)):
        amax, _, nonfinite = gpu.amax_and_nonfinite(x.reshape(-1, x.shape[-1]))
        return amax, nonfinite
    return amax_along(x.float().flatten(), 0), (~torch.isfinite(x)).sum()


def amax_of(x: Tensor) -> Tensor:
    """Largest magnitude of `x` as an FP32 scalar; 0 for an empty tensor. NaN is passed over."""
    return amax_and_nonfinite(x)[0]


def nonfinite_count(x: Tensor) -> Tensor:
    """Number of NaN and infinite elements of `x`, an int64 scalar on its device.

    Quantizing hides them (NaN becomes +6), so count before, and skip the step if there are any.
    """
    return amax_and_nonfinite(x)[1]


def quantize(
    x: Tensor,
    format: Format,
    *,
    amax: Tensor | None = None,
    rounding: Rounding = "nearest",
    key: RoundingKey | None = None,
    offset: int = 0,
    guard: bool = False,
    swizzled: bool = False,
) -> QuantizedTensor:
    """Quantize `x` in blocks along its last dimension.

    Leading dimensions are rows. Where K, or in a format of two-dimensional blocks the number of
    rows, is not a multiple of the block, the tensor is padded with zeros inside and cut again: a
    last, smaller block has a scale of its own. An odd K cannot be packed in 4 bits and is refused.

    Neither NaN nor infinity is reported here (`nonfinite_count` does): amax passes over NaN, which
    becomes +6 in E2M1 and stays NaN in E4M3; infinity takes the largest code.

    Args:
        x: [..., K] BF16, FP16 or FP32, any strides; zero rows allowed.
        format: NVFP4, MXFP8, ...
        amax: FP32 scalar, the amax to use for the global scale in place of x's own, for a tensor
            of which `x` is a part. Only for formats with a global scale.
        rounding: "nearest", or "stochastic" (E2M1 only), which takes `key`.
        key: names the tensor; see `RoundingKey`.
        offset: index of x's first element in the row-major order of the tensor that `key` names,
            for a chunk of rows that is rounded alone.
        guard: leave room below 6 so that stochastic rounding is unbiased where the block scale
            rounded down: slope bias -0.41% to -0.06%, MSE 18.9e-3 to 23.5e-3 on Gaussian data.
            Only for stochastic rounding in formats with a global scale.
        swizzled: give the block scales of a matrix as tensor cores read them.

    Returns:
        QuantizedTensor on x's device.

    Raises:
        ValueError: an unknown dtype, no dimension, an odd K in 4 bits, or options that do not
            belong together.
    """
    _check_input(x, format)
    check_options(x, format, amax, rounding, key, offset, guard)
    columns = x.shape[-1]
    x_RK = x.detach().reshape(math.prod(x.shape[:-1]), columns)
    if amax is not None:
        amax = amax.to(x.device, torch.float32).reshape(())
    stochastic_key = key if rounding == "stochastic" else None
    if use_triton(x):
        wanted = gpu.Wanted(format, amax, largest_code(guard), stochastic_key)
        if gpu.accepts("quantize", gpu.copy_refusal(x_RK, wanted, offset)):
            return from_copy(*gpu.quantize(x_RK, wanted, swizzled), format, x.shape, swizzled)
    if use_compiled(x):
        parts = _quantize_compiled(x_RK, format, amax, guard, stochastic_key, offset)
    else:
        if amax is None and format.has_global_scale:
            amax = amax_of(x_RK)
        parts = reference.quantize(x_RK, format, amax, guard, stochastic_key, offset)
    codes_RK, scales_RB, decode = parts
    made = QuantizedTensor(
        codes_RK.reshape(*x.shape[:-1], codes_RK.shape[1]),
        scales_RB.reshape(*x.shape[:-1], scales_RB.shape[1]),
        decode,
        format,
        x.shape,
    )
    return made.swizzle() if swizzled else made


def from_copy(
    copy: tuple[Tensor, Tensor],
    decode: Tensor | None,
    format: Format,
    shape: torch.Size,
    swizzled: bool,
) -> QuantizedTensor:
    """The codes and scales that a kernel gave for a matrix, as a tensor of `shape`."""
    codes, scales = (t if t.dim() < 2 else t.reshape(*shape[:-1], t.shape[-1]) for t in copy)
    return QuantizedTensor(codes, scales, decode, format, shape, swizzled)


def dequantize(
    q: QuantizedTensor, dtype: torch.dtype = torch.float32, *, global_scale: bool = True
) -> Tensor:
    """The values of `q`: `code * block scale * global scale`, in FP32, rounded to `dtype` at last.

    With `global_scale=False` the global scale is left out. What remains fits BF16 exactly (E2M1
    times an E4M3 scale has 6 significant bits, or 4 times a power of two): the operand of the
    emulated GEMM, which applies the global scales after. FP8 blocks with free FP32 scales round.

    Returns:
        `dtype`, q.shape.
    """
    rows, columns = math.prod(q.shape[:-1]), q.shape[-1]
    codes_RK = q.codes.reshape(rows, q.codes.shape[-1])
    outer = q.global_scale if global_scale else None
    why = gpu.dequantize_refusal(q.format, columns, dtype)
    if use_triton(q.codes) and gpu.accepts("dequantize", why):
        arguments = (q.scales, q.swizzled, q.format, columns, outer, dtype)
        return gpu.dequantize(codes_RK, *arguments).reshape(q.shape)
    scales = q.plain().scales
    scales_RB = scales.reshape(rows, scales.shape[-1])
    implementation = _dequantize_compiled if use_compiled(q.codes) else reference.dequantize
    return implementation(codes_RK, scales_RB, q.format, columns, outer, dtype).reshape(q.shape)


def _check_packable(shape: torch.Size, format: Format) -> None:
    if format.element_bits == 4 and shape[-1] % 2:
        raise ValueError(
            f"{format.name} packs two codes a byte, so the last dimension of {tuple(shape)} must "
            f"be even: pad {shape[-1]} to {shape[-1] + 1}"
        )


def _check_input(x: Tensor, format: Format) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(f"quantize takes BF16, FP16 or FP32, not {x.dtype}; convert it first")
    if x.dim() == 0:
        raise ValueError("quantize takes a tensor of at least one dimension, not a scalar")
    _check_packable(x.shape, format)


def check_options(
    x: Tensor,
    format: Format,
    amax: Tensor | None,
    rounding: Rounding,
    key: RoundingKey | None,
    offset: int,
    guard: bool,
) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', not {rounding!r}")
    if amax is not None and not format.has_global_scale:
        raise ValueError(
            f"{format.name} has no global scale, so amax= has no meaning: leave it out"
        )
    if amax is not None and amax.numel() != 1:
        raise ValueError(f"amax must be one FP32 value, not {tuple(amax.shape)}")
    if rounding == "stochastic":
        if format.element != "e2m1":
            raise ValueError(f"stochastic rounding exists for E2M1 only, not for {format.name}")
        if key is None:
            raise ValueError("stochastic rounding needs key=RoundingKey(...)")
        check_elements(offset, x.numel())
    if guard and not (rounding == "stochastic" and format.has_global_scale):
        raise ValueError(
            "guard=True belongs to stochastic rounding in a format with a global scale, not to "
            f"{rounding} rounding in {format.name}"
        )


def _quantize_compiled(
    x_RK: Tensor,
    format: Format,
    amax: Tensor | None,
    guard: bool,
    key: RoundingKey | None,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    random = None if key is None else (*key.words, *key.counter)
    if format.has_global_scale:
        return cpu.quantize_nvfp4(
            x_RK,
            block=format.block,
            amax=amax,
            largest_code=largest_code(guard),
            random=random,
            offset=offset,
        )
    codes_RK, scales_RB = cpu.quantize(
        x_RK,
        element=format.element,
        block=format.block,
        scale=format.scale,
        scale_dtype=format.scale_dtype,
        scale_rounding=format.scale_rounding,
        random=random,
        offset=offset,
    )
    return codes_RK, scales_RB, None


def _dequantize_compiled(
    codes_RK: Tensor,
    scales_RB: Tensor,
    format: Format,
    columns: int,
    global_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return cpu.dequantize(
        codes_RK,
        scales_RB,
        element=format.element,
        block=format.block,
        scale=format.scale,
        columns=columns,
        global_scale=1.0 if global_scale is None else global_scale.item(),
        dtype=dtype,
    )
