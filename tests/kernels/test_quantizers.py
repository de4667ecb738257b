"""The other interpreted kernels equal the reference to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quant.backend import backend
from quant.copies import quantize_weight, transposed_tokens
from quant.formats import FORMATS, NVFP4, NVFP4_2D
from quant.hadamard import SIGNS, rht_transpose
from quant.layout import swizzle_scales
from quant.quantize import amax_of, dequantize, nonfinite_count, quantize
from quant.reference import nvfp4_global_scales
from tests.kernels.inputs import COLUMN_KEY, KINDS, inside_poison, matrix, raw, words

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

Run = Callable[..., Any]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("guard", [False, True])
def test_global_scales(interpreted: Run, guard: bool):
    amax = torch.logspace(-44, 38, 20)
    amax = torch.cat([amax, torch.tensor([0.0, float("inf"), 3.2e-35, 3.1e-35])])
    largest = [6 * 16 / 17 if guard else 6.0] * len(amax)
    params = interpreted("kernels.nvfp4:global_scales", amax, largest)
    with backend("reference"):
        wanted = nvfp4_global_scales(amax, guard=guard)
    for column, expected in enumerate((wanted.decode, wanted.block, wanted.first)):
        assert torch.equal(params[:, column], expected)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    encode = torch.ones(()) / (scales * wanted.rest[:, None])
    assert torch.equal(params[:, 4:131], encode.clamp(max=torch.finfo(torch.float32).max))


@pytest.mark.parametrize("dtype", DTYPES, ids=["BF16", "FP32"])
@pytest.mark.parametrize("kind", KINDS)
def test_amax_and_nonfinite(interpreted: Run, kind: str, dtype: torch.dtype):
    x = matrix(kind, (34, 80), dtype)
    if kind == "gaussian":
        x[3, 5], x[33, 79], x[7] = float("nan"), float("-inf"), float("nan")
    found = interpreted("kernels.amax:amax_and_nonfinite", inside_poison(x), SIGNS)
    with backend("reference"):
        wanted = torch.stack([amax_of(x), amax_of(rht_transpose(x))])
        assert torch.equal(found.amax, wanted)
        assert found.nonfinite == nonfinite_count(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=["BF16", "FP32"])
@pytest.mark.parametrize(
    ("kind", "shape"), [("gaussian", (16, 16)), ("wide", (144, 80)), ("tiny", (32, 48))]
)
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_weight(
    interpreted: Run, kind: str, shape: tuple[int, int], dtype: torch.dtype, swizzled: bool
):
    w = matrix(kind, shape, dtype)
    params = interpreted("kernels.nvfp4:global_scales", amax_of(w)[None], [6.0])[0]
    made = interpreted(
        "kernels.weight:quantize_weight", inside_poison(w), params, swizzled=swizzled
    )
    with backend("reference"):
        wanted = quantize_weight(w, NVFP4_2D)
    for copy, q in zip(made, wanted, strict=True):
        assert torch.equal(copy.codes, q.codes)
        assert torch.equal(
            raw(copy.scales), raw(swizzle_scales(q.scales) if swizzled else q.scales)
        )


@pytest.mark.parametrize("shape", [(16, 16), (144, 80), (32, 528)])
def test_codes_transpose(interpreted: Run, shape: tuple[int, int]):
    with backend("reference"):
        q = quantize(matrix("gaussian", shape, torch.float32), NVFP4_2D)
        wanted = q.transpose()
    assert torch.equal(interpreted("kernels.transpose:transpose_codes", q.codes), wanted.codes)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_dequantize(interpreted: Run, name: str, swizzled: bool):
    format = FORMATS[name]
    for kind, shape in (("wide", (17, 96)), ("tiny", (1, 544))):
        q = quantize(matrix(kind, shape, torch.float32), format)
        for dtype in DTYPES:
            for outer in (False, True):
                with backend("reference"):
                    wanted = dequantize(q, dtype, global_scale=outer)
                values = interpreted(
                    "kernels.dequantize:dequantize",
                    q.codes,
                    swizzle_scales(q.scales) if swizzled else q.scales,
                    columns=shape[1],
                    block=format.block[1],
                    global_scale=q.global_scale if outer else None,
                    dtype=dtype,
                    swizzled=swizzled,
                )
                assert torch.equal(raw(values), raw(wanted))


def test_unswizzle(interpreted: Run):
    q = quantize(matrix("gaussian", (130, 80), torch.float32), NVFP4)
    plain = interpreted("kernels.dequantize:unswizzle", swizzle_scales(q.scales), (130, 5))
    assert torch.equal(raw(plain), raw(q.scales))


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("column", [False, True], ids=["row", "column"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_floor", "mxfp8", "mxfp8_floor"])
def test_mx(interpreted: Run, name: str, column: bool, swizzled: bool):
    format = FORMATS[name]
    e2m1 = format.element == "e2m1"
    for kind, dtype in (("wide", torch.bfloat16), ("tiny", torch.float32)):
        x = matrix(kind, (66, 96) if swizzled else (17, 32), dtype)
        for stochastic in [False, True] if e2m1 else [False]:
            for rht in [0, 32] if e2m1 and column else [0]:
                lines = transposed_tokens(x, format, rht) if column else x
                options: dict[str, Any] = {"rounding": "stochastic", "key": COLUMN_KEY}
                with backend("reference"):
                    wanted = quantize(lines, format, **(options if stochastic else {}))
                made = interpreted(
                    "kernels.mx:quantize_mx",
                    inside_poison(x),
                    element=format.element,
                    column=column,
                    round_up=format.scale_rounding == "up",
                    random=words(COLUMN_KEY) if stochastic else None,
                    signs=SIGNS * 2 if rht else None,
                    swizzled=swizzled,
                )
                assert torch.equal(made.codes, wanted.codes)
                scales = swizzle_scales(wanted.scales) if swizzled else wanted.scales
                assert torch.equal(raw(made.scales), raw(scales))
