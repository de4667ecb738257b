"""FP8 blocks with scales that are powers of two are MXFP8 to tensor cores: the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.formats import FP8_BLOCK, FP8_BLOCK_2D, FP8_BLOCK_FREE, MXFP8, Format
from quant.gemm import format_name, gemm
from quant.layout import unswizzle_scales
from quant.quantize import QuantizedTensor, dequantize, quantize

FORMATS = pytest.mark.parametrize("format", [FP8_BLOCK, FP8_BLOCK_2D], ids=lambda f: f.name)
SHAPES = pytest.mark.parametrize("shape", [(1, 16), (5, 160), (130, 272)], ids=str)


def wide(*shape: int) -> Tensor:
    """Exponents over all of FP32, and blocks of zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-140, 120, shape, generator=generator).float())
    x[:, 128:256] = 0
    return x


def as_mxfp8(q: QuantizedTensor) -> QuantizedTensor:
    """The same bytes under the other name, block scales as the tensor cores have them."""
    blocks = -(-q.shape[1] // 32)
    scales = unswizzle_scales(q.swizzle().scales, (q.shape[0], blocks))
    return QuantizedTensor(q.codes, scales, None, MXFP8, q.shape)


@FORMATS
@SHAPES
def test_a_value_is_mxfp8_s(format: Format, shape: tuple[int, int]):
    q = quantize(wide(*shape), format)
    mx = as_mxfp8(q)
    assert mx.scales.dtype == torch.float8_e8m0fnu
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(mx, dtype), dequantize(q, dtype))


@FORMATS
@SHAPES
def test_the_layout_of_tensor_cores_and_back_loses_nothing(format: Format, shape: tuple[int, int]):
    q = quantize(wide(*shape), format)
    swizzled = quantize(wide(*shape), format, swizzled=True)
    assert swizzled.swizzled
    assert torch.equal(swizzled.scales.view(torch.uint8), q.swizzle().scales.view(torch.uint8))
    assert torch.equal(swizzled.plain().scales, q.scales)
    assert torch.equal(dequantize(swizzled), dequantize(q))


def test_a_weight_transposes_in_either_layout():
    q = quantize(wide(160, 48), FP8_BLOCK_2D)
    assert torch.equal(q.swizzle().transpose().plain().scales, q.transpose().scales)
    assert torch.equal(dequantize(q.swizzle().transpose()), dequantize(q).t())


@FORMATS
def test_the_table_takes_it_for_mxfp8(format: Format):
    assert format_name(format) == "mxfp8"
    a, b = (quantize(torch.randn(n, 160), format) for n in (8, 16))
    assert torch.equal(gemm(as_mxfp8(a), as_mxfp8(b), "reference"), gemm(a, b, "reference"))


def test_free_scales_are_no_tensor_core_s():
    assert format_name(FP8_BLOCK_FREE) == "fp8_block_free"
    with pytest.raises(ValueError, match="one-byte"):
        quantize(wide(4, 128), FP8_BLOCK_FREE, swizzled=True)
