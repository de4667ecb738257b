"""The three GEMMs of a quantized linear: their values, their shapes and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant.linear as linear_module
from quant import (
    FORMATS,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    RECIPES,
    Copy,
    QuantizedTensor,
    QuantLinear,
    Role,
    RoundingKey,
    apply_recipe,
    named_recipe,
    quantize,
    rht_transpose,
)
from quant.gemm import Decoded, gemm, transpose
from quant.recipe import LINEAR_RECIPES
from tests.quant.toy_hybrid import (
    SEED,
    ToyHybrid,
    batch,
    gradients,
    normal,
    one_linear,
    recorded_copies,
    run,
    weight_gradient,
)


def sum_bound(a: QuantizedTensor | Decoded, b: QuantizedTensor | Decoded) -> Tensor:
    """Twice what the order of an FP32 sum may change: n * 2^-24 * sum |a| |b|, for each side."""

    def magnitude(x: QuantizedTensor | Decoded) -> Tensor:
        return (x.dequantize() if isinstance(x, QuantizedTensor) else x.values.float()).abs()

    return 2 * a_length(a) * 2**-24 * (magnitude(a) @ magnitude(b).t())


def a_length(a: QuantizedTensor | Decoded) -> int:
    return a.shape[1] if isinstance(a, QuantizedTensor) else a.values.shape[1]


def bf16_ulp(y: Tensor) -> Tensor:
    return torch.exp2(torch.floor(torch.log2(y.abs().clamp(min=1e-30))) - 7)


# The GEMMs


@pytest.mark.parametrize("tokens", [48, 50, 3])
def test_the_three_gemms_of_nvfp4_are_those_of_the_papers_table(tokens: int) -> None:
    layer, precision = one_linear()
    precision.begin(3, 2)
    x, dy = normal(tokens, 64, seed=1), normal(tokens, 96, seed=2)
    y, dx = run(layer, x, dy)

    def key(copy: Copy) -> RoundingKey:
        return RoundingKey(SEED, 3, 2, 0, Role.GRADIENT, copy)

    w = quantize(layer.weight, NVFP4_2D)
    row, column = (
        quantize(dy, NVFP4, rounding="stochastic", key=key(Copy.ROW)),
        quantize(rht_transpose(dy), NVFP4, rounding="stochastic", key=key(Copy.COLUMN)),
    )
    cases = [
        (y, quantize(x, NVFP4), w, True),
        (dx, row, w.transpose(), True),
        (weight_gradient(layer), column, quantize(rht_transpose(x), NVFP4), False),
    ]
    for result, a, b, rounded in cases:
        expected = gemm(a, b, "reference")
        bound = sum_bound(a, b) + (bf16_ulp(expected) if rounded else 0)
        assert ((result - expected).abs() <= bound).all()
        assert result.abs().sum() > 0
        assert torch.equal(result.bfloat16().float(), result) == rounded


@pytest.mark.parametrize("recipe", [*LINEAR_RECIPES])
@pytest.mark.parametrize("tokens", [64, 50])
def test_every_recipe_equals_its_block_by_block_reference(recipe: str, tokens: int) -> None:
    x, dy = normal(tokens, 64, seed=1), normal(tokens, 96, seed=2)
    emulated, _ = one_linear(recipe)
    reference, _ = one_linear(recipe, backend="reference")
    y, dx = run(emulated, x, dy)
    y_ref, dx_ref = run(reference, x, dy)
    w = emulated.weight.detach()
    for result, expected, sizes, rounded in [
        (y, y_ref, x.abs() @ w.abs().t(), True),
        (dx, dx_ref, dy.abs() @ w.abs(), True),
        (weight_gradient(emulated), weight_gradient(reference), dy.abs().t() @ x.abs(), False),
    ]:
        # Quantized magnitudes stay under three times the originals after an RHT of these sizes.
        bound = 2 * 96 * 2**-24 * 9 * sizes + (bf16_ulp(expected) if rounded else 0)
        assert ((result - expected).abs() <= bound).all()
        # A layer in 4 bits is near the exact product, and not equal to it.
    exact = x @ w.t()
    error = (y - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.25
    assert (weight_gradient(emulated) != 0).float().mean() > 0.8


@pytest.mark.parametrize(
    ("a", "b"), [("nvfp4", "nvfp4_2d"), ("nvfp4", "mxfp8"), ("mxfp4", None), (None, "fp8_block")]
)
def test_formats_may_be_mixed_in_one_gemm(a: str | None, b: str | None) -> None:
    x, w = normal(33, 256, seed=1), normal(48, 256, seed=2)
    left = quantize(x, FORMATS[a]) if a else Decoded(x.bfloat16())
    right = quantize(w, FORMATS[b]) if b else Decoded(w.bfloat16())
    difference = (gemm(left, right, "emulated") - gemm(left, right, "reference")).abs()
    assert (difference <= sum_bound(left, right)).all()


@pytest.mark.parametrize("backend", ["emulated", "reference"])
def test_a_weight_of_square_blocks_transposes_without_loss(backend: str) -> None:
    q = quantize(normal(64, 48, seed=3), NVFP4_2D)
    one = Decoded(torch.eye(64).bfloat16())
    assert torch.equal(gemm(one, transpose(q, backend), backend), q.dequantize())
    values = q.dequantize(global_scale=False)
    assert torch.equal(values.bfloat16().float(), values)


def test_operands_padded_differently_over_tokens_multiply_alike() -> None:
    x, dy = normal(50, 32, seed=1), normal(50, 48, seed=2)
    a = quantize(nn.functional.pad(dy.t(), (0, 14)), NVFP4)
    b = quantize(nn.functional.pad(x.t(), (0, 46)), MXFP8)
    c = quantize(nn.functional.pad(x.t(), (0, 14)), MXFP8)
    assert torch.equal(gemm(a, b, "emulated"), gemm(a, c, "emulated"))


def test_the_weight_gradient_of_a_bf16_linear_is_fp32_from_the_gemm() -> None:
    layer, _ = one_linear("bf16")
    x, dy = normal(48, 64, seed=1), normal(48, 96, seed=2)
    y, dx = run(layer, x, dy)
    bf16 = {
        n: t.bfloat16().float() for n, t in (("x", x), ("dy", dy), ("w", layer.weight.detach()))
    }
    dw = weight_gradient(layer)
    assert dw.dtype == torch.float32
    assert torch.equal(dw, bf16["dy"].t() @ bf16["x"])
    assert (dw.bfloat16().float() != dw).float().mean() > 0.9
    assert torch.equal(y, (bf16["x"] @ bf16["w"].t()).bfloat16().float())
    assert torch.equal(dx, (bf16["dy"] @ bf16["w"]).bfloat16().float())


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_paper"])
def test_a_bf16_parameter_still_gets_an_fp32_gradient(recipe: str) -> None:
    model = ToyHybrid().bfloat16()
    apply_recipe(model, named_recipe(recipe).with_blocks(0, 0), num_blocks=4, seed=0).begin(0, 0)
    model(batch().bfloat16()).float().square().sum().backward()
    for gradient in gradients(model).values():
        assert gradient.dtype == torch.float32
        assert (gradient.bfloat16().float() != gradient).any()


def test_bf16_and_fp32_inputs_of_equal_value_give_equal_results() -> None:
    x, dy = (normal(48, c, seed=c).bfloat16() for c in (64, 96))
    layer, _ = one_linear()
    y16, dx16 = run(layer, x, dy)
    dw16 = weight_gradient(layer).clone()
    layer.weight.grad = None
    y32, dx32 = run(layer, x.float(), dy.float())
    assert (y16.dtype, dx16.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(y16.float(), y32)
    assert torch.equal(dx16.float(), dx32)
    assert torch.equal(dw16, weight_gradient(layer))


# Shapes


def test_an_expanded_gradient_a_transposed_input_and_three_dimensions_equal_the_plain_case() -> (
    None
):
    x, ones = normal(48, 64, seed=1), torch.ones(48, 96)
    layer, _ = one_linear()
    _, dx = run(layer, x, ones)
    dw = weight_gradient(layer).clone()

    def again(make_input: Callable[[Tensor], Tensor]) -> None:
        layer.weight.grad = None
        leaf = x.clone().requires_grad_()
        layer(make_input(leaf)).sum().backward()
        assert torch.equal(weight_gradient(layer), dw)
        assert torch.equal(leaf.grad, dx)

    again(lambda leaf: leaf)
    again(lambda leaf: leaf.t().contiguous().t())
    again(lambda leaf: leaf.view(3, 16, 64))
    again(lambda leaf: leaf.view(2, 24, 64).transpose(0, 1).contiguous().transpose(0, 1))
    assert layer(x.view(3, 16, 64)).shape == (3, 16, 96)


@pytest.mark.parametrize("recipe", [*LINEAR_RECIPES])
def test_no_tokens_give_no_output_and_a_zero_gradient(recipe: str) -> None:
    layer, precision = one_linear(recipe)
    y, dx = run(layer, torch.empty(2, 0, 64), torch.empty(2, 0, 96))
    assert (y.shape, dx.shape) == ((2, 0, 96), (2, 0, 64))
    assert torch.equal(weight_gradient(layer), torch.zeros(96, 64))
    assert precision.nonfinite() == 0


def test_zeros_stay_zeros() -> None:
    layer, _ = one_linear()
    y, dx = run(layer, torch.zeros(16, 64), torch.zeros(16, 96))
    for result in (y, dx, weight_gradient(layer)):
        assert torch.equal(result, torch.zeros_like(result))


def test_a_wrong_width_is_refused_by_name() -> None:
    layer, _ = one_linear()
    with pytest.raises(ValueError, match=r"blocks\.0\.up takes 64 features, not \(4, 128\)"):
        layer(torch.zeros(4, 128))


# Leave-one-out, on bytes


def operands(recipe: str) -> dict[str, tuple[bytes, bytes]]:
    """Codes and scales of the six operands of one layer."""
    layer, _ = one_linear(recipe, 64, 64, backend="reference")
    factors: list[QuantizedTensor] = []
    original = linear_module.gemm

    def record(a: QuantizedTensor, b: QuantizedTensor, *rest: Any) -> Tensor:
        factors.extend((a, b))
        return original(a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "gemm", record)
        run(layer, normal(64, 64, seed=1), normal(64, 64, seed=2))
    names = ("input", "weight", "dgrad_gradient", "dgrad_weight", "wgrad_gradient", "wgrad_input")
    return {
        name: (q.codes.numpy().tobytes(), q.scales.view(torch.uint8).numpy().tobytes())
        for name, q in zip(names, factors, strict=True)
    }


@pytest.mark.parametrize(
    ("recipe", "changed"),
    [
        ("no_rht", {"wgrad_gradient", "wgrad_input"}),
        ("no_sr", {"dgrad_gradient", "wgrad_gradient"}),
        ("no_2d", {"weight", "dgrad_weight"}),
        ("guard_16_17", {"dgrad_gradient", "wgrad_gradient"}),
        ("all_layers", set()),
    ],
)
def test_leaving_one_technique_out_changes_the_bytes_of_its_operands_alone(
    recipe: str, changed: set[str]
) -> None:
    paper, variant = operands("nvfp4_paper"), operands(recipe)
    assert {name for name in paper if paper[name] != variant[name]} == changed
    if recipe == "no_sr":  # the scales do not depend on how the codes are rounded
        assert all(paper[name][1] == variant[name][1] for name in changed)


# Memory


def saved_bytes(layer: QuantLinear, x: Tensor) -> int:
    """Bytes that the forward pass keeps, the weight itself apart."""
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() != layer.weight.data_ptr():
            saved[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return sum(saved.values())


@pytest.mark.parametrize(
    ("recipe", "bytes_per_element"),
    [("nvfp4_paper", 0.6), ("mxfp4", 0.6), ("mxfp8", 1.1), ("fp8_block", 1.1), ("bf16", 2.0)],
)
def test_only_codes_and_scales_are_kept_for_the_backward_pass(
    recipe: str, bytes_per_element: float
) -> None:
    layer, _ = one_linear(recipe)
    x = normal(256, 64, seed=1).requires_grad_()
    assert 0 < saved_bytes(layer, x) <= bytes_per_element * x.numel()


def test_without_gradients_nothing_is_kept_and_no_column_copy_is_made() -> None:
    layer, _ = one_linear()
    x = normal(32, 64, seed=1)
    with recorded_copies() as made, torch.no_grad():
        y = layer(x)
        assert saved_bytes(layer, x) == 0
    assert y.grad_fn is None
    assert all(column is None for _, _, column in made)
    frozen, _ = one_linear()
    frozen.weight.requires_grad_(False)
    with recorded_copies() as made:
        y_frozen, _ = run(frozen, x, normal(32, 96, seed=2))
    assert all(column is None for _, _, column in made)
    assert torch.equal(y, y_frozen)


@pytest.mark.parametrize(
    ("recipe", "bytes_per_element"),
    [("nvfp4_paper", 0.57), ("no_2d", 1.13), ("mxfp4", 1.07), ("mxfp8", 2.07), ("bf16", 0.0)],
)
def test_of_a_weight_only_codes_and_scales_are_cached(
    recipe: str, bytes_per_element: float
) -> None:
    layer, precision = one_linear(recipe, 128, 256)
    for step in range(2):
        precision.begin(step, 0)
        run(layer, normal(16, 128, seed=1), normal(16, 256, seed=2))
        assert precision.cache_nbytes <= bytes_per_element * layer.weight.numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_a_cuda_device_agrees_with_the_cpu(recipe: str) -> None:
    x, dy = normal(48, 64, seed=1), normal(48, 96, seed=2)
    on_cpu, _ = one_linear(recipe)
    on_gpu, _ = one_linear(recipe)
    on_gpu.cuda()
    y, dx = run(on_cpu, x, dy)
    y_gpu, dx_gpu = run(on_gpu, x.cuda(), dy.cuda())
    for mine, other in ((y, y_gpu), (dx, dx_gpu)):
        assert ((mine - other.cpu()).abs() <= bf16_ulp(mine) + 1e-5).all()
    torch.testing.assert_close(weight_gradient(on_gpu).cpu(), weight_gradient(on_cpu))
