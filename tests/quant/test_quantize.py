"""The block quantizers: bytes, values and refusals, on plain torch and on the compiled kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quant.formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_2D,
    FP8_BLOCK_2D_FREE,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    Format,
)
from quant.hadamard import rht_transpose
from quant.quantize import (
    QuantizedTensor,
    amax_of,
    dequantize,
    nonfinite_count,
    quantize,
)
from quant.rounding import Copy, Role, RoundingKey

pytestmark = pytest.mark.usefixtures("implementation")

KEY = RoundingKey(seed=11, step=1, microbatch=0, layer=3, role=Role.GRADIENT, copy=Copy.ROW)
ALL = list(FORMATS.values())
FOUR_BITS = [f for f in ALL if f.element == "e2m1"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stochastic(x: Tensor, format: Format = NVFP4, **options) -> QuantizedTensor:
    return quantize(x, format, rounding="stochastic", **{"key": KEY, **options})


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(bytes_of(a.scales), bytes_of(b.scales))
    assert a.global_scale == b.global_scale


def bytes_of(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.uint8)


# ---- Bytes of the references ---------------------------------------------------------------------


@pytest.mark.parametrize(("format", "name"), [(NVFP4, "1d"), (NVFP4_2D, "2d")])
def test_every_golden_nvfp4_tensor_is_equal_to_the_byte(shared: Path, format, name):
    golden = load_file(shared / "golden" / "nvfp4_te_reference.safetensors")
    cases = [key.removesuffix(".x") for key in golden if key.endswith(".x")]
    assert len(cases) >= 10
    for case in cases:
        x = golden[f"{case}.x"]
        q = quantize(x, format)
        assert torch.equal(q.codes, golden[f"{case}.{name}.codes"]), case
        assert torch.equal(bytes_of(q.scales), golden[f"{case}.{name}.scales"]), case
        assert amax_of(x) == golden[f"{case}.1d.amax"], case


def test_every_golden_transformed_tensor_is_equal_to_the_byte(shared: Path):
    golden = load_file(shared / "golden" / "nvfp4_te_reference.safetensors")
    cases = [key.removesuffix(".rht_t.y") for key in golden if key.endswith(".rht_t.y")]
    assert cases
    for case in cases:
        q = quantize(rht_transpose(golden[f"{case}.x"]), NVFP4)
        assert torch.equal(q.codes, golden[f"{case}.rht_t.codes"]), case
        assert torch.equal(bytes_of(q.scales), golden[f"{case}.rht_t.scales"]), case


@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_floor", "mxfp8", "mxfp8_floor"])
def test_every_golden_mx_tensor_is_equal_to_the_byte(shared: Path, format):
    golden = load_file(shared / "golden" / "mx_torchao.safetensors")
    element, _, floor = format.partition("_")
    name = f"{element}.{floor or 'rceil'}"
    cases = [key.removesuffix(".x") for key in golden if key.endswith(".x")]
    assert len(cases) >= 10
    for case in cases:
        q = quantize(golden[f"{case}.x"], FORMATS[format])
        assert torch.equal(q.codes, golden[f"{case}.{name}.codes"]), case
        assert torch.equal(bytes_of(q.scales), golden[f"{case}.{name}.scales"]), case


def test_a_ramp_packs_its_even_element_into_the_low_nibble():
    x = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2)
    assert quantize(x, NVFP4).codes.tolist()[:4] == [0x10, 0x32, 0x54, 0x76]


# ---- Shapes, strides and dtypes ------------------------------------------------------------------


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(0, 64), (1, 2), (5, 34), (17, 130), (2, 3, 20), (48,)])
def test_codes_and_scales_have_their_documented_shapes(format, shape):
    q = quantize(normal(*shape), format)
    columns, block = shape[-1], format.block[1]
    assert q.codes.dtype == torch.uint8
    assert q.codes.shape == (*shape[:-1], columns * format.element_bits // 8)
    assert q.scales.dtype == format.scale_dtype
    assert q.scales.shape == (*shape[:-1], -(-columns // block))
    assert q.shape == shape
    assert dequantize(q).shape == shape
    assert (q.global_scale is not None) == format.has_global_scale


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_a_padded_tensor_holds_the_codes_of_the_tensor(format):
    x = normal(21, 50)
    padded = torch.zeros(256, 256)
    padded[:21, :50] = x
    q, whole = quantize(x, format), quantize(padded, format)
    assert torch.equal(q.codes, whole.codes[:21, : q.codes.shape[1]])
    assert torch.equal(bytes_of(q.scales), bytes_of(whole.scales[:21, : q.scales.shape[1]]))


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strided_inputs_give_what_their_copies_give(format, dtype):
    base = normal(32, 48).to(dtype)
    views = [base.t(), base[::2], base[:, 1:33], base[:1].expand(20, 48), base.view(4, 8, 48)]
    for view in views:
        assert_same(quantize(view, format), quantize(view.clone(), format))


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_leading_dimensions_are_rows(format):
    x = normal(3, 5, 64)
    q, flat = quantize(x, format), quantize(x.view(15, 64), format)
    assert torch.equal(q.codes.view(15, -1), flat.codes)
    assert torch.equal(dequantize(q), dequantize(flat).view(3, 5, 64))


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_quantized_as_the_fp32_numbers_they_are(format, dtype):
    x = normal(16, 64).to(dtype)
    assert_same(quantize(x, format), quantize(x.float(), format))


def test_a_tensor_that_wants_gradients_is_quantized_without_a_graph():
    x = normal(4, 16).requires_grad_()
    assert not dequantize(quantize(x, NVFP4)).requires_grad


# ---- Scales --------------------------------------------------------------------------------------


def test_an_outside_amax_takes_the_place_of_the_tensors_own():
    x = normal(64, 32)
    shards = [quantize(part, NVFP4, amax=amax_of(x)) for part in x.split(16)]
    whole = quantize(x, NVFP4)
    assert torch.equal(torch.cat([s.codes for s in shards]), whole.codes)
    assert all(s.global_scale == whole.global_scale for s in shards)


def test_a_two_dimensional_scale_is_repeated_on_its_rows():
    scales = bytes_of(quantize(normal(40, 64), NVFP4_2D).scales)
    for start in (0, 16, 32):
        assert (scales[start : start + 16] == scales[start]).all()


@pytest.mark.parametrize(
    "format", [NVFP4_2D, FP8_BLOCK_2D, FP8_BLOCK_2D_FREE], ids=lambda f: f.name
)
@pytest.mark.parametrize("shape", [(256, 384), (32, 48), (18, 34), (130, 2)])
def test_a_two_dimensional_format_quantizes_a_matrix_and_its_transpose_to_equal_values(
    format, shape
):
    w = normal(*shape)
    transposed = quantize(w, format).transpose()
    assert_same(transposed, quantize(w.t(), format))
    assert torch.equal(dequantize(transposed), dequantize(quantize(w, format)).t())


def test_fp8_block_scales_are_powers_of_two():
    scales = quantize(normal(64, 512) * 37, FP8_BLOCK).scales
    assert (torch.frexp(scales).mantissa == 0.5).all()


@pytest.mark.parametrize("format", [FP8_BLOCK, FP8_BLOCK_2D, MXFP4, MXFP8], ids=lambda f: f.name)
def test_scales_that_round_up_never_clip(format):
    x = normal(128, 256).abs() + 1
    q = quantize(x, format)
    assert (dequantize(q).amax() - x.amax()).abs() <= x.amax() * 2**-3
    block = x.reshape(-1, format.block[1]).amax(1)
    scale = q.scales.float().flatten()
    assert (block <= scale * format.element_max).all()


# ---- Values at the edges -------------------------------------------------------------------------


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_zeros_have_finite_scales_and_stay_zero(format):
    q = quantize(torch.zeros(16, 16), format)
    assert q.scales.float().isfinite().all()
    assert q.global_scale is None or q.global_scale == 1
    assert (dequantize(q) == 0).all()


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_smallest_numbers_decode_within_a_factor_two_or_to_zero(format, dtype):
    for value in (1e-30, 1e-34, 3e-36, 1e-38, 1e-39, 1e-40, 2.0**-133, 2.0**-149):
        x = torch.full((16, 32), value).to(dtype)
        q = quantize(x, format)
        assert q.scales.float().isfinite().all()
        assert q.global_scale is None or q.global_scale >= torch.finfo(torch.float32).tiny
        back = dequantize(q)
        within = (back >= x.float() / 2) & (back <= x.float() * 2)
        assert (within | (back == 0)).all(), (value, back[0, 0])


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_the_largest_numbers_decode_to_finite_ones(format):
    x = torch.full((16, 32), 1.0e38)
    back = dequantize(quantize(x, format))
    assert (back > 0.7e38).all()
    assert back.isfinite().all()


def test_a_block_whose_scale_underflows_has_scale_byte_zero_and_saturated_codes():
    x = torch.full((2, 16), 1e3)
    x[1] = 1e-3
    x[1, 8:] = -1e-3
    q = quantize(x, NVFP4)
    assert bytes_of(q.scales).flatten().tolist() == [0x7E, 0]
    assert q.codes[1].tolist() == [0x77] * 4 + [0xFF] * 4
    assert (dequantize(q)[1] == 0).all()


def test_minus_zero_is_code_zero_and_the_smallest_negatives_keep_their_sign():
    x = torch.tensor([6.0, -0.0, -0.1, -0.25] * 4)
    assert quantize(x, NVFP4).codes.tolist() == [0x07, 0x88] * 4


def test_nan_and_infinity_are_counted():
    x = normal(8, 32)
    assert nonfinite_count(x) == 0
    x[3, 5], x[4, 0], x[7, 31] = torch.nan, torch.inf, -torch.inf
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert nonfinite_count(x.to(dtype)) == 3
        assert nonfinite_count(x.to(dtype).t()) == 3


def test_amax_passes_over_nan_and_sees_infinity():
    x = torch.tensor([1.0, -3.0, torch.nan])
    assert amax_of(x) == 3
    assert amax_of(torch.tensor([1.0, -torch.inf])) == torch.inf
    assert amax_of(torch.empty(0, 16)) == 0


@pytest.mark.parametrize("format", FOUR_BITS, ids=lambda f: f.name)
def test_nan_becomes_six_and_infinity_the_largest_code(format):
    x = torch.full((1, 32), 0.5)
    x[0, 0], x[0, 1], x[0, 2] = torch.nan, torch.inf, -torch.inf
    codes = quantize(x, format).codes
    assert codes[0, 0] == 0x77
    assert codes[0, 1] & 15 == 15


# ---- Dequantize ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format", [f for f in ALL if not f.name.endswith("free")], ids=lambda f: f.name
)
def test_values_without_the_global_scale_fit_bf16_exactly(format):
    q = quantize(normal(64, 128), format)
    exact = dequantize(q, torch.float32, global_scale=False)
    assert torch.equal(dequantize(q, torch.bfloat16, global_scale=False).float(), exact)
    outer = 1.0 if q.global_scale is None else q.global_scale
    assert torch.equal(exact * outer, dequantize(q))


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_the_fp32_values_rounded_once(format, dtype):
    q = quantize(normal(32, 96), format)
    assert torch.equal(dequantize(q, dtype), dequantize(q).to(dtype))


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_quantizing_the_values_again_changes_nothing(format):
    values = dequantize(quantize(normal(32, 128), format))
    again = dequantize(quantize(values, format))
    assert torch.allclose(values, again, rtol=2**-20, atol=0)


def test_bytes_are_those_of_four_and_a_half_bits():
    q = quantize(normal(64, 256), NVFP4)
    assert q.nbytes == 64 * 256 * 4.5 / 8 + 4


def test_a_copy_on_a_device_is_the_same_tensor():
    q = quantize(normal(4, 32), NVFP4)
    assert_same(q.to("cpu"), q)


# ---- Error on Gaussian data ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "options", "mse"),
    [
        (NVFP4, {}, 9.0e-3),
        (NVFP4_2D, {}, 12.4e-3),
        (NVFP4, {"rounding": "stochastic", "key": KEY}, 18.9e-3),
        (NVFP4, {"rounding": "stochastic", "key": KEY, "guard": True}, 23.5e-3),
    ],
    ids=["1x16", "16x16", "stochastic", "stochastic with guard"],
)
def test_the_error_on_gaussian_data_is_the_known_one(format, options, mse):
    x = normal(1024, 2048)
    error = dequantize(quantize(x, format, **options)) - x
    assert error.square().mean().item() == pytest.approx(mse, rel=0.01)


@pytest.mark.parametrize(
    ("format", "slope", "zeros"),
    [(FORMATS["mxfp4"], -0.010, 0.107), (FORMATS["mxfp4_floor"], -0.019, 0.088)],
    ids=["up", "floor"],
)
def test_the_two_mx_scale_conventions_differ_as_known(format, slope, zeros):
    x = normal(1024, 2048)
    back = dequantize(quantize(x, format))
    assert ((back * x).sum() / x.square().sum()).item() - 1 == pytest.approx(slope, abs=0.001)
    assert (back == 0).float().mean().item() == pytest.approx(zeros, abs=0.001)


# ---- Stochastic rounding -------------------------------------------------------------------------


def test_stochastic_gradients_are_neither_zero_nor_biased():
    x, draws = normal(128, 128), 256
    keys = [dataclasses.replace(KEY, step=s) for s in range(draws)]
    copies = [stochastic(x, key=key, guard=True) for key in keys]
    scale = copies[0].scales.float().repeat_interleave(16, 1) * copies[0].global_scale
    y = (x / scale).abs()
    step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0)) * scale
    values = torch.stack([dequantize(q) for q in copies])
    assert (values != 0).float().mean() > 0.8
    # Eight random bits lose up to one part in 256 of a step; a draw's deviation is half a step.
    assert ((values.mean(0) - x).abs() <= step / 256 + 5 * step / 2 / draws**0.5).all()
    bias = ((x - values.mean(0)) * x.sign() / step).mean().item()
    assert bias == pytest.approx(1 / 512, abs=5 * 0.5 / (draws * x.numel()) ** 0.5)


def test_the_guard_removes_the_slope_bias():
    x = normal(1024, 2048)
    for guard, bias in ((False, -0.0041), (True, -0.0006)):
        back = dequantize(stochastic(x, guard=guard))
        slope = ((back * x).sum() / x.square().sum()).item() - 1
        assert slope == pytest.approx(bias, abs=0.0004)


def test_the_guard_leaves_nothing_to_clip():
    x = normal(512, 512)
    for guard, clips in ((False, True), (True, False)):
        q = stochastic(x, guard=guard)
        scale = q.scales.float().repeat_interleave(16, 1) * q.global_scale
        assert ((x / scale).abs().max() > 6 * (1 + 2**-20)) == clips


@pytest.mark.parametrize("format", FOUR_BITS, ids=lambda f: f.name)
@pytest.mark.parametrize("columns", [64, 50])
def test_a_chunk_of_rows_draws_the_bits_it_has_in_the_whole(format, columns):
    rows = format.block[0]
    x = normal(4 * rows, columns)
    amax = {"amax": amax_of(x)} if format.has_global_scale else {}
    whole = stochastic(x, format)
    for i, part in enumerate(x.split(rows)):
        chunk = stochastic(part, format, offset=i * rows * columns, **amax)
        assert torch.equal(chunk.codes, whole.codes[i * rows : (i + 1) * rows])


@pytest.mark.parametrize("field", ["seed", "step", "microbatch", "layer", "role", "copy"])
def test_another_key_makes_errors_that_do_not_correlate(field):
    x = normal(256, 256)
    keys = (KEY, dataclasses.replace(KEY, **{field: getattr(KEY, field) + 1}))
    # The guard keeps clipping out, which errs alike whatever the bits.
    errors = torch.stack(
        [(dequantize(stochastic(x, key=k, guard=True)) - x).flatten() for k in keys]
    )
    assert abs(torch.corrcoef(errors)[0, 1].item()) < 5 / x.numel() ** 0.5


def test_the_same_key_makes_the_same_bytes():
    assert_same(stochastic(normal(32, 64)), stochastic(normal(32, 64)))


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FOUR_BITS, ids=lambda f: f.name)
def test_an_odd_last_dimension_cannot_be_packed(format):
    with pytest.raises(ValueError, match=r"\(4, 33\).*pad 33 to 34"):
        quantize(torch.zeros(4, 33), format)


def test_an_odd_number_of_rows_cannot_be_transposed_in_four_bits():
    with pytest.raises(ValueError, match=r"\(32, 5\)"):
        quantize(torch.zeros(5, 32), NVFP4_2D).transpose()


def test_a_one_dimensional_format_has_no_exact_transpose():
    with pytest.raises(ValueError, match="quantize the transposed tensor"):
        quantize(torch.zeros(16, 32), NVFP4).transpose()


def test_inputs_that_are_not_tensors_of_floats_are_refused():
    with pytest.raises(ValueError, match="float64"):
        quantize(torch.zeros(16, dtype=torch.float64), NVFP4)
    with pytest.raises(ValueError, match="one dimension"):
        quantize(torch.tensor(1.0), NVFP4)


def test_options_that_do_not_belong_together_are_refused():
    x = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="needs key"):
        quantize(x, NVFP4, rounding="stochastic")
    with pytest.raises(ValueError, match="E2M1 only"):
        quantize(x, MXFP8, rounding="stochastic", key=KEY)
    with pytest.raises(ValueError, match="guard"):
        quantize(x, NVFP4, guard=True)
    with pytest.raises(ValueError, match="guard"):
        quantize(x, MXFP4, rounding="stochastic", key=KEY, guard=True)
    with pytest.raises(ValueError, match="no global scale"):
        quantize(x, MXFP4, amax=torch.tensor(1.0))
    with pytest.raises(ValueError, match="one FP32 value"):
        quantize(x, NVFP4, amax=torch.ones(2))
    with pytest.raises(ValueError, match="'floor'"):
        quantize(x, NVFP4, rounding="floor")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounding key"):
        quantize(x, NVFP4, rounding="stochastic", key=KEY, offset=1 << 36)
