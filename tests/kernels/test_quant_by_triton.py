"""`quant` gives the same bytes by Triton's kernels as by plain torch, and runs a linear on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.backend import backend
from quant.copies import quantize_rowcol, quantize_weight
from quant.formats import FP8_BLOCK, MXFP4, MXFP4_FLOOR, MXFP8, NVFP4, NVFP4_2D, Format
from quant.quantize import QuantizedTensor, amax_and_nonfinite, dequantize, quantize
from tests.kernels.inputs import COLUMN_KEY, ROW_KEY, matrix, raw
from tests.kernels.quant_cases import reference_step

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

Run = Callable[..., Any]
CASES = "tests.kernels.quant_cases"
AMAX = torch.tensor(7.5)


def assert_same(made: QuantizedTensor | None, wanted: QuantizedTensor | None) -> None:
    assert (made is None) == (wanted is None)
    if made is None or wanted is None:
        return
    assert (made.shape, made.swizzled) == (wanted.shape, wanted.swizzled)
    assert made.codes.shape == wanted.codes.shape
    assert made.scales.shape == wanted.scales.shape
    assert torch.equal(raw(made.codes), raw(wanted.codes))
    assert torch.equal(raw(made.scales), raw(wanted.scales))
    assert (made.global_scale is None) == (wanted.global_scale is None)
    if made.global_scale is not None:
        assert torch.equal(made.global_scale, wanted.global_scale)


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize(
    ("format", "options"),
    [
        (NVFP4, {}),
        (NVFP4, {"amax": AMAX}),
        (NVFP4, {"rounding": "stochastic", "key": ROW_KEY, "guard": True}),
        (NVFP4_2D, {}),
        (MXFP4, {"rounding": "stochastic", "key": ROW_KEY}),
        (MXFP4_FLOOR, {}),
        (MXFP8, {}),
        (FP8_BLOCK, {}),  # no kernel: routed to plain torch
    ],
    ids=lambda v: v.name if isinstance(v, Format) else "+".join(v),
)
def test_one_copy(interpreted: Run, format: Format, options: dict[str, Any], swizzled: bool):
    x = matrix("gaussian", (32, 96), torch.bfloat16)
    with backend("reference"):
        wanted = quantize(x, format, swizzled=swizzled, **options)
    assert_same(interpreted(f"{CASES}:one", x, format, swizzled=swizzled, **options), wanted)


@pytest.mark.parametrize("shape", [(3, 5, 32), (64,), (17, 24), (0, 32)], ids=str)
def test_any_shape_is_taken_or_routed(interpreted: Run, shape: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with backend("reference"):
        wanted = quantize(x, NVFP4)
        amax = amax_and_nonfinite(x)
    assert_same(interpreted(f"{CASES}:one", x, NVFP4), wanted)
    assert interpreted(f"{CASES}:amax", x) == amax


ROWCOL = [
    (NVFP4, NVFP4, {"column_rht": True}),
    (NVFP4, NVFP4, {"row_amax": AMAX, "column_amax": AMAX}),
    (
        NVFP4,
        NVFP4,
        {
            "column_rht": True,
            "row_rounding": "stochastic",
            "row_key": ROW_KEY,
            "column_rounding": "stochastic",
            "column_key": COLUMN_KEY,
            "column_guard": True,
        },
    ),
    (None, NVFP4, {}),
    (NVFP4, None, {}),
    (NVFP4, MXFP8, {}),
    (MXFP8, MXFP8, {}),
    (MXFP4, MXFP4, {"column_rht": 32}),
    (MXFP4, NVFP4, {"column_rht": 16}),
    (NVFP4, NVFP4, {"column_rht": 32}),  # no kernel
]


@pytest.mark.parametrize(("row", "column", "options"), ROWCOL)
def test_row_and_column_copies(
    interpreted: Run, row: Format | None, column: Format | None, options: dict[str, Any]
):
    x = matrix("gaussian", (50, 64), torch.float32)
    x[3, 4] = float("nan")
    with backend("reference"):
        wanted = quantize_rowcol(x, row, column, swizzled=True, **options)
    made = interpreted(f"{CASES}:rowcol", x, row, column, swizzled=True, **options)
    assert_same(made.row, wanted.row)
    assert_same(made.column, wanted.column)
    assert made.nonfinite == wanted.nonfinite == 1


def test_options_that_do_not_belong_together_are_refused_alike(interpreted: Run):
    x = matrix("gaussian", (32, 64), torch.float32)
    with pytest.raises(ValueError, match="needs key"):
        interpreted(f"{CASES}:rowcol", x, NVFP4, None, row_rounding="stochastic")


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_both_copies_of_a_weight(interpreted: Run, swizzled: bool):
    w = matrix("gaussian", (48, 80), torch.float32)
    for amax in (None, AMAX):
        with backend("reference"):
            wanted = quantize_weight(w, NVFP4_2D, amax, swizzled=swizzled)
        made = interpreted(f"{CASES}:weight", w, NVFP4_2D, amax, swizzled=swizzled)
        for a, b in zip(made, wanted, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", [NVFP4, MXFP4, MXFP8, FP8_BLOCK], ids=lambda f: f.name)
def test_values(interpreted: Run, format: Format, dtype: torch.dtype):
    with backend("reference"):
        q = quantize(matrix("gaussian", (20, 96), torch.float32), format)
        layouts = (q,) if format is FP8_BLOCK else (q, q.swizzle())
        for made in layouts:
            for scaled in (False, True):
                wanted = dequantize(q, dtype, global_scale=scaled)
                found = interpreted(f"{CASES}:values", made, dtype, scaled)
                assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("capability", "recipe", "kernels"),
    [
        ((10, 0), "nvfp4", "blackwell (dot_scaled)"),
        ((9, 0), "nvfp4", "emulated (decode)"),
        ((10, 0), "mxfp4", "blackwell (dot_scaled)"),
        ((10, 0), "fp8_block", "blackwell (dot_scaled)"),
        ((9, 0), "fp8_block", "emulated (decode)"),
    ],
)
def test_a_linear_runs_on_the_kernels(
    interpreted: Run, capability: tuple[int, int], recipe: str, kernels: str
):
    """Forward and backward: the codes are the reference's, so only the order of sums differs."""
    x, w, dy = (
        matrix("gaussian", shape, torch.float32) for shape in ((64, 96), (128, 96), (64, 128))
    )
    w *= 0.05
    made = interpreted(f"{CASES}:step", x, w, dy, recipe, capability)
    wanted = reference_step(x, w, dy, recipe)
    y, dx, dw = made[:3]
    for found, expected, sizes, rounded in (
        (y, wanted[0], x.abs() @ w.abs().t(), True),
        (dx, wanted[1], dy.abs() @ w.abs(), True),
        (dw, wanted[2], dy.abs().t() @ x.abs(), False),
    ):
        # Quantized magnitudes stay under three times the originals after an RHT of these sizes.
        bound = 2 * 128 * 2.0**-24 * 9 * sizes + (ulp(expected) if rounded else 0)
        assert ((found - expected).abs() <= bound).all()
    assert made[3] == kernels
    # Of the same codes, so equal up to the order in which two processes add.
    assert made[4] == pytest.approx(wanted[4], rel=1e-5)
    assert made[5] == wanted[5]


@pytest.mark.parametrize(
    ("capability", "recipe"), [((10, 0), "nvfp4"), ((9, 0), "fp8_block")], ids=str
)
def test_wgrad_adds_in_the_kernel_what_autograd_would_add(
    interpreted: Run, capability: tuple[int, int], recipe: str
):
    inputs = [
        tuple(matrix("gaussian", shape, torch.float32) * size for shape in ((32, 32), (32, 64)))
        for size in (1.0, 3.0)
    ]
    w = matrix("wide", (64, 32), torch.float32) * 1e-9
    sums = [interpreted(f"{CASES}:sums", inputs, w, recipe, capability, add) for add in (0, 1)]
    (plain, calls), (added, more) = sums
    assert torch.equal(plain, added)
    assert plain.any()
    assert (calls, more) == (0, 1)  # the second micro-batch's, by the kernel


def ulp(y: Tensor) -> Tensor:
    """One unit in the last place of BF16."""
    return torch.exp2(torch.floor(torch.log2(y.abs().clamp(min=1e-30))) - 7)
