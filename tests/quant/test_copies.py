"""Row and column copies of one tensor, and a weight with its transpose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.copies import quantize_rowcol, quantize_weight
from quant.formats import FORMATS, FP8_BLOCK, MXFP4, MXFP8, NVFP4, NVFP4_2D
from quant.hadamard import rht_transpose
from quant.quantize import QuantizedTensor, dequantize, quantize
from quant.rounding import Copy, Role, RoundingKey

pytestmark = pytest.mark.usefixtures("implementation")


def key(copy: Copy) -> RoundingKey:
    return RoundingKey(seed=5, step=1, microbatch=2, layer=3, role=Role.GRADIENT, copy=copy)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def assert_same(a: QuantizedTensor | None, b: QuantizedTensor) -> None:
    assert a is not None
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8))
    assert a.global_scale == b.global_scale
    assert a.shape == b.shape


@pytest.mark.parametrize("shape", [(64, 96), (50, 34), (16, 2), (200, 130)])
@pytest.mark.parametrize(("format", "rht"), [(NVFP4, True), (NVFP4, 16), (MXFP4, 32)])
def test_copies_are_those_of_the_parts_done_alone(shape, format, rht):
    x_TK = normal(*shape)
    made = quantize_rowcol(
        x_TK,
        format,
        format,
        row_rounding="stochastic",
        row_key=key(Copy.ROW),
        column_rounding="stochastic",
        column_key=key(Copy.COLUMN),
        column_rht=rht,
    )
    transformed = rht_transpose(x_TK, size=16 if rht is True else rht)
    rounding = {"rounding": "stochastic"}
    assert_same(made.row, quantize(x_TK, format, **rounding, key=key(Copy.ROW)))
    assert_same(made.column, quantize(transformed, format, **rounding, key=key(Copy.COLUMN)))
    assert made.nonfinite == 0


@pytest.mark.parametrize("format", [NVFP4, MXFP4, MXFP8, FP8_BLOCK], ids=lambda f: f.name)
@pytest.mark.parametrize("tokens", [1, 7, 16, 130])
def test_without_a_transform_tokens_are_padded_to_whole_blocks(format, tokens):
    x_TK = normal(tokens, 34)
    made = quantize_rowcol(x_TK, None, format)
    block = format.block[1]
    padded = torch.zeros(-(-tokens // block) * block, 34, dtype=torch.bfloat16)
    padded[:tokens] = x_TK
    assert made.row is None
    assert_same(made.column, quantize(padded.t(), format))


def test_a_copy_that_is_not_wanted_is_not_made():
    assert quantize_rowcol(normal(16, 32), NVFP4, None).column is None
    assert quantize_rowcol(normal(16, 32), None, NVFP4, column_rht=True).row is None


def test_one_tensor_may_have_copies_of_two_formats():
    made = quantize_rowcol(normal(32, 64), MXFP8, NVFP4, column_rht=True)
    assert_same(made.row, quantize(normal(32, 64), MXFP8))
    assert_same(made.column, quantize(rht_transpose(normal(32, 64)), NVFP4))


def test_outside_amaxes_reach_their_copies():
    x_TK, amax = normal(32, 64), torch.tensor(100.0)
    made = quantize_rowcol(x_TK, NVFP4, NVFP4, row_amax=amax, column_amax=2 * amax, column_rht=True)
    assert_same(made.row, quantize(x_TK, NVFP4, amax=amax))
    assert_same(made.column, quantize(rht_transpose(x_TK), NVFP4, amax=2 * amax))


@pytest.mark.parametrize("column", [None, NVFP4])
@pytest.mark.parametrize("rht", [False, True])
def test_nan_and_infinity_are_counted_in_the_input(column, rht):
    x_TK = normal(40, 66)
    x_TK[3, 1], x_TK[39, 65], x_TK[0, 0] = torch.nan, torch.inf, -torch.inf
    assert quantize_rowcol(x_TK, NVFP4, column, column_rht=rht).nonfinite == 3


def test_a_transposed_input_gives_what_its_copy_gives():
    x_KT = normal(48, 80)
    a = quantize_rowcol(x_KT.t(), NVFP4, NVFP4, column_rht=True)
    b = quantize_rowcol(x_KT.t().contiguous(), NVFP4, NVFP4, column_rht=True)
    assert b.row is not None
    assert b.column is not None
    assert_same(a.row, b.row)
    assert_same(a.column, b.column)


def test_errors_of_the_two_copies_of_a_symmetric_gradient_do_not_correlate():
    g = normal(256, 256).float()
    g = g + g.t()
    made = quantize_rowcol(
        g,
        NVFP4,
        NVFP4,
        row_rounding="stochastic",
        row_key=key(Copy.ROW),
        row_guard=True,
        column_rounding="stochastic",
        column_key=key(Copy.COLUMN),
        column_guard=True,
    )
    assert made.row is not None
    assert made.column is not None
    errors = torch.stack([(dequantize(q) - g).flatten() for q in (made.row, made.column)])
    assert abs(torch.corrcoef(errors)[0, 1].item()) < 5 / g.numel() ** 0.5


def test_a_weight_and_its_transpose_hold_the_same_values_in_two_dimensional_blocks():
    w_NK = normal(96, 64)
    q, q_t = quantize_weight(w_NK, NVFP4_2D)
    assert torch.equal(dequantize(q).t(), dequantize(q_t))
    assert_same(q_t, quantize(w_NK.t(), NVFP4_2D))


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if not f.is_2d])
def test_a_weight_in_one_dimensional_blocks_is_quantized_along_each_side(name):
    w_NK = normal(96, 64)
    q, q_t = quantize_weight(w_NK, FORMATS[name])
    assert_same(q, quantize(w_NK, FORMATS[name]))
    assert_same(q_t, quantize(w_NK.t(), FORMATS[name]))


def test_only_matrices_have_columns():
    with pytest.raises(ValueError, match="tokens, features"):
        quantize_rowcol(torch.zeros(2, 3, 4), NVFP4, None)
    with pytest.raises(ValueError, match="two dimensions"):
        quantize_weight(torch.zeros(16), NVFP4)
