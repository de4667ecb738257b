"""The interpreted row and column kernel equals the reference to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quant.backend import backend
from quant.copies import quantize_rowcol, transposed_tokens
from quant.formats import NVFP4
from quant.hadamard import SIGNS
from quant.layout import swizzle_scales
from quant.quantize import QuantizedTensor, amax_of
from tests.kernels.inputs import COLUMN_KEY, ROW_KEY, inside_poison, matrix, raw, words

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

Run = Callable[..., Any]


def assert_equals_reference(
    run: Run, x: torch.Tensor, stochastic: bool, rht: bool, swizzled: bool, guard: bool = False
) -> None:
    options: dict[str, Any] = {"column_rht": rht}
    if stochastic:
        options |= {"row_rounding": "stochastic", "column_rounding": "stochastic"}
        options |= {"row_key": ROW_KEY, "column_key": COLUMN_KEY}
        options |= {"row_guard": guard, "column_guard": guard}
    with backend("reference"):
        expected = quantize_rowcol(x, NVFP4, NVFP4, **options)
        amax = torch.stack([amax_of(x), amax_of(transposed_tokens(x, NVFP4, rht))])
    largest = 6 * 16 / 17 if guard else 6.0
    params = run("kernels.nvfp4:global_scales", amax, [largest, largest])
    row, column = run(
        "kernels.rowcol:quantize_rowcol",
        inside_poison(x),
        row_params=params[0],
        column_params=params[1],
        row_random=words(ROW_KEY) if stochastic else None,
        column_random=words(COLUMN_KEY) if stochastic else None,
        signs=SIGNS if rht else None,
        swizzled=swizzled,
    )
    for made, wanted, decode in ((row, expected.row, 0), (column, expected.column, 1)):
        assert isinstance(wanted, QuantizedTensor)
        scales = swizzle_scales(wanted.scales) if swizzled else wanted.scales
        assert torch.equal(made.codes, wanted.codes)
        assert torch.equal(raw(made.scales), raw(scales))
        assert params[decode, 0] == wanted.global_scale


@pytest.mark.parametrize("shape", [(1, 16), (17, 32), (16, 272)])
def test_shapes(interpreted: Run, shape: tuple[int, int]):
    x = matrix("gaussian", shape, torch.bfloat16)
    assert_equals_reference(interpreted, x, stochastic=False, rht=True, swizzled=True)


def test_stochastic_rounding(interpreted: Run):
    x = matrix("gaussian", (130, 80), torch.bfloat16)
    assert_equals_reference(interpreted, x, stochastic=True, rht=True, swizzled=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["BF16", "FP32"])
@pytest.mark.parametrize("kind", ["wide", "tiny", "zeros", "any bits"])
def test_values(interpreted: Run, kind: str, dtype: torch.dtype):
    x = matrix(kind, (48, 64), dtype)
    assert_equals_reference(interpreted, x, stochastic=False, rht=True, swizzled=False)


@pytest.mark.parametrize("kind", ["wide", "any bits"])
def test_stochastic_values(interpreted: Run, kind: str):
    x = matrix(kind, (48, 64), torch.float32)
    assert_equals_reference(interpreted, x, stochastic=True, rht=True, swizzled=False, guard=True)


def test_a_column_copy_without_transform(interpreted: Run):
    x = matrix("wide", (33, 48), torch.bfloat16)
    assert_equals_reference(interpreted, x, stochastic=True, rht=False, swizzled=True)


def test_no_rows(interpreted: Run):
    x = torch.empty(0, 32, dtype=torch.bfloat16)
    assert_equals_reference(interpreted, x, stochastic=False, rht=True, swizzled=True)


def test_one_copy_alone(interpreted: Run):
    x = matrix("gaussian", (32, 64), torch.bfloat16)
    params = interpreted("kernels.nvfp4:global_scales", amax_of(x)[None], [6.0])[0]
    row, column = interpreted(
        "kernels.rowcol:quantize_rowcol", x, row_params=params, column_params=None
    )
    assert column is None
    with backend("reference"):
        wanted = quantize_rowcol(x, NVFP4, None).row
    assert wanted is not None
    assert torch.equal(row.codes, wanted.codes)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(16, 24), "multiple of 16 columns"),
        (torch.zeros(16, 16, dtype=torch.float16), "BF16 or FP32"),
        (torch.zeros(2, 16, 16), "matrix"),
    ],
)
def test_what_the_kernel_does_not_take(interpreted: Run, x: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        interpreted("kernels.rowcol:quantize_rowcol", x, row_params=None, column_params=None)
