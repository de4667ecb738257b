"""What NVFP4's Triton kernels share: global scales, block scales and where they are stored.

The encode scale of a block, `1 / (sf * S_dec)`, depends only on the E4M3 code of sf. So the 128
possible ones are tabulated once a tensor, correctly rounded, and the quantizers look them up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
ENCODE_SCALE_CAP = tl.constexpr(2.0**126)

# A tensor's FP32 parameters, in one buffer that `global_scales` fills.
DECODE = tl.constexpr(0)
BLOCK = tl.constexpr(1)
FIRST = tl.constexpr(2)
TABLE = tl.constexpr(4)
NUM_PARAMETERS = 4 + 128


@triton.jit
def global_scales_kernel(amax_ptr, largest_ptr, params_ptr, STRIDE: tl.constexpr):
    """Parameters of one tensor from its amax; see `quant.quantize` for the arithmetic."""
    tensor = tl.program_id(0)
    amax = tl.load(amax_ptr + tensor)
    largest, reciprocal = tl.load(largest_ptr + 2 * tensor), tl.load(largest_ptr + 2 * tensor + 1)
    encode = tl.minimum(tl.div_rn(largest, amax), ENCODE_SCALE_CAP)
    encode = tl.where((amax == 0) | (encode == 0), 1.0, encode)
    decode = tl.div_rn(1.0, encode)
    capped = encode == ENCODE_SCALE_CAP
    codes = tl.arange(0, 128)
    block_scales = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    table = tl.div_rn(tl.full([128], 1.0, tl.float32), block_scales * tl.where(capped, 1.0, decode))
    params_ptr += tensor * STRIDE
    tl.store(params_ptr + DECODE, decode)
    tl.store(params_ptr + BLOCK, encode * reciprocal)
    tl.store(params_ptr + FIRST, tl.where(capped, encode, 1.0))
    tl.store(params_ptr + TABLE + codes, tl.minimum(table, FLOAT_MAX))


def global_scales(amax: Tensor, largest_codes: Sequence[float]) -> Tensor:
    """Parameters of several tensors, which the quantizers take, from their amaxes.

    Args:
        amax: FP32 [tensors], on the device.
        largest_codes: what the largest magnitude is to become: 6, or 6 * 16/17 with the guard of
            stochastic rounding.

    Returns:
        FP32 [tensors, 132]: `[:, 0]` is the decode scale S_dec.
    """
    assert amax.dtype == torch.float32
    assert amax.shape == (len(largest_codes),)
    params = torch.empty(len(largest_codes), NUM_PARAMETERS, device=amax.device)
    largest = _largest(tuple(largest_codes), amax.device)
    global_scales_kernel[(len(largest),)](amax, largest, params, STRIDE=NUM_PARAMETERS)
    return params


@functools.cache
def _largest(codes: tuple[float, ...], device: torch.device) -> Tensor:
    """448 times each, and one over it. Kept: a copy to a GPU waits for all that runs there."""
    return torch.tensor([(448 * c, 1 / c) for c in codes], dtype=torch.float32, device=device)


_BLOCK_SCALE = tl.constexpr(
    "{ .reg .f32 s, encode; .reg .b16 e; .reg .b64 at; .reg .pred capped;"
    " mul.rn.f32 s, $3, $4; min.f32 s, s, 0f43E00000;"
    " cvt.rn.satfinite.e4m3x2.f32 e, 0f00000000, s; cvt.u32.u16 $0, e;"
    " mad.wide.u32 at, $0, 4, $6; ld.global.nc.f32 encode, [at + 16];"
    " setp.neu.f32 capped, $5, 0f3F800000;"
    " selp.f32 $1, $5, encode, capped; selp.f32 $2, encode, 0f3F800000, capped; }"
)


@triton.jit
def block_scale(amax, params_ptr, block, first, TARGET: tl.constexpr):
    """E4M3 code of a block's scale, and the two factors that bring its values to E2M1's range.

    The second factor is 1, unless the global scale is capped.

    Args:
        amax: FP32, the block's.
        params_ptr, block, first: the tensor's parameters, and two of them, loaded.
    """
    if TARGET > 0:
        code, a, b = tl.inline_asm_elementwise(
            _BLOCK_SCALE,
            "=&r,=&r,=&r,r,r,r,l",
            (amax, block, first, params_ptr.to(tl.int64)),
            dtype=(tl.int32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return code.to(tl.uint8), a, b
    code = tl.minimum(amax * block, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    encode = tl.load(params_ptr + TABLE + code.to(tl.int32))
    capped = first != 1.0
    return code, tl.where(capped, first, encode), tl.where(capped, encode, 1.0)


@triton.jit
def scale_offset(row, column, row_stride, num_column_tiles, SWIZZLED: tl.constexpr):
    """Byte offset of the block scale (row, column).

    Args:
        row_stride: scales in a row, plain layout.
        num_column_tiles: tiles of 4 columns, swizzled layout (`quant.layout.swizzle_scales`).
    """
    if SWIZZLED:
        tile = (row // 128) * num_column_tiles + column // 4
        return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    return row * row_stride + column


def empty_scales(rows: int, columns: int, swizzled: bool, device: torch.device) -> Tensor:
    """Room for the block scales of `rows` x `columns` blocks, with padding if swizzled."""
    shape: tuple[int, ...] = (rows, columns)
    if swizzled:
        shape = (-(-rows // 128) * 128 * (-(-columns // 4) * 4),)
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
