"""Matrices of more than 2^31 elements: offsets do not wrap around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.backend import backend
from quant.copies import quantize_rowcol, quantize_weight
from quant.formats import MXFP4, MXFP8, NVFP4, NVFP4_2D, Format
from quant.hadamard import rht_transpose
from quant.quantize import QuantizedTensor, amax_of, dequantize, quantize
from tests.kernels.inputs import matrix, raw

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

Run = Callable[..., Any]
CASES = "tests.kernels.far_cases"
SHAPE = (128, 256)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["BF16", "FP32"])


def amaxes(x: Tensor) -> Tensor:
    with backend("reference"):
        return torch.stack([amax_of(x), amax_of(rht_transpose(x))])


def assert_same(made: list[tuple[Tensor, Tensor]], wanted: list[QuantizedTensor | None]) -> None:
    assert len(made) == len(wanted)
    for (codes, scales), q in zip(made, wanted, strict=True):
        assert q is not None
        assert torch.equal(codes, q.codes)
        assert torch.equal(raw(scales), raw(q.scales))


@DTYPES
def test_statistics(interpreted: Run, dtype: torch.dtype):
    x = matrix("gaussian", SHAPE, dtype)
    x[127, 255], x[100, 7] = 9.0, float("nan")
    found = interpreted(f"{CASES}:statistics", x)
    assert torch.equal(found.amax[:1], amaxes(x)[:1])
    assert found.nonfinite == 1


@DTYPES
def test_row_and_column_copies(interpreted: Run, dtype: torch.dtype):
    x = matrix("gaussian", SHAPE, dtype)
    amax = amaxes(x)
    with backend("reference"):
        q = quantize_rowcol(x, NVFP4, NVFP4, column_rht=True, row_amax=amax[0], column_amax=amax[1])
    assert_same(interpreted(f"{CASES}:rowcol", x, amax), [q.row, q.column])


@DTYPES
def test_weights(interpreted: Run, dtype: torch.dtype):
    w = matrix("gaussian", SHAPE, dtype)
    amax = amaxes(w)
    with backend("reference"):
        wanted = quantize_weight(w, NVFP4_2D, amax[0])
    assert_same(interpreted(f"{CASES}:weight", w, amax), list(wanted))


@pytest.mark.parametrize("column", [False, True], ids=["row", "column"])
@pytest.mark.parametrize("format", [MXFP4, MXFP8], ids=lambda f: f.name)
def test_mx(interpreted: Run, format: Format, column: bool):
    """The last program's tile is 64 x 64."""
    x = matrix("gaussian", (128, 1024), torch.bfloat16)
    ((codes, scales),) = interpreted(f"{CASES}:mx", x, column, format.element)
    with backend("reference"):
        q = quantize(x.t() if column else x, format)
    width, blocks = 64 * format.element_bits // 8, 64 // format.block[1]
    assert torch.equal(codes[-64:, -width:], q.codes[-64:, -width:])
    assert torch.equal(raw(scales[-64:, -blocks:]), raw(q.scales[-64:, -blocks:]))


def test_values(interpreted: Run):
    with backend("reference"):
        q = quantize(matrix("gaussian", SHAPE, torch.bfloat16), MXFP8)
        wanted = dequantize(q, torch.bfloat16)
    made = interpreted(f"{CASES}:values", q.codes, q.scales, 32)
    assert torch.equal(made, wanted[-16:])
