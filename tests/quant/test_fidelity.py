"""How far recipes are from BF16: the measuring itself, and what each technique is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quant import LINEAR_RECIPES, Copy, Role, RoundingKey, named_recipe
from quant.fidelity import (
    GEMM_NAMES,
    Captured,
    Distance,
    capturing,
    gemm_distances,
    gemms,
    gradients,
    kurtosis,
    rounding_bias,
    true_gemms,
    under_recipe,
    weight_mismatch,
)
from quant.linear import QuantLinear
from tests.quant.toy_hybrid import SEED, ToyHybrid, batch, loss, normal, one_linear

KEY = RoundingKey(seed=3, step=1, microbatch=0, layer=2, role=Role.GRADIENT, copy=Copy.ROW)


def captured_pass() -> tuple[ToyHybrid, dict[str, Captured], dict[str, Tensor]]:
    """A toy hybrid, what its linears meet in a BF16 pass over 512 tokens, and the gradient.

    In sequences of 4: in long ones unmasked attention would give every token the same value.
    """
    model = ToyHybrid()
    copied, precision = under_recipe(model, named_recipe("bf16"), num_blocks=4, seed=SEED)
    precision.begin(0, 0)
    inside = [name for name in precision.layers if name.startswith("blocks.")]
    with capturing(precision, inside) as seen:
        copied(batch(512).view(128, 4, -1)).square().mean().backward()
    return model, seen, gradients(copied)


def distances(recipe: str, layer: str, captured: Captured, model: ToyHybrid) -> dict[str, Distance]:
    chosen = replace(named_recipe(recipe), first=0, last=0)
    _, precision = under_recipe(model, chosen, num_blocks=4, seed=SEED)
    precision.begin(0, 0)
    linear = precision.layers[layer]
    return gemm_distances(gemms(linear, captured), true_gemms(linear, captured))


def wgrad_error(recipe: str, captured: Captured) -> float:
    """Of a single linear [96, 64] on given tensors."""
    layer, _ = one_linear(recipe)
    return gemm_distances(gemms(layer, captured), true_gemms(layer, captured))[
        "wgrad"
    ].relative_error


def test_distances_of_parts_add_up_to_the_distance_of_the_whole() -> None:
    measured, true = normal(6, 8, seed=1), normal(6, 8, seed=2)
    parts = [Distance.between(measured[rows], true[rows]) for rows in (slice(2), slice(2, 6))]
    whole = parts[0] + parts[1]
    assert whole.relative_error == pytest.approx(float((measured - true).norm() / true.norm()))
    cosine = torch.nn.functional.cosine_similarity(measured.flatten(), true.flatten(), dim=0)
    assert whole.cosine == pytest.approx(float(cosine), rel=1e-5)


def test_distances_between_zeros_are_none_and_from_zero_are_whole() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    nothing, everything = Distance.between(zeros, zeros), Distance.between(zeros, ones)
    assert (nothing.relative_error, nothing.cosine) == (0, 1)
    assert (everything.relative_error, everything.cosine) == (1, 0)
    assert Distance.between(ones, zeros).relative_error == float("inf")


def test_captured_tensors_are_those_that_made_the_weight_gradients() -> None:
    model, captured, true = captured_pass()
    _, precision = under_recipe(model, named_recipe("bf16"), num_blocks=4, seed=SEED)
    assert len(captured) == 9
    for name, each in captured.items():
        again = true_gemms(precision.layers[name], each)["wgrad"]
        assert torch.equal(again, true[f"{name}.weight"]), name


def test_after_capturing_the_linears_are_watched_no_more() -> None:
    model, precision = under_recipe(ToyHybrid(), named_recipe("bf16"), num_blocks=4, seed=SEED)
    with capturing(precision, list(precision.layers)) as seen:
        pass
    loss(model, 1).backward()
    assert seen == {}


def test_a_recipe_is_applied_to_a_copy() -> None:
    model = ToyHybrid()
    copied, _ = under_recipe(model, named_recipe("nvfp4"), num_blocks=4, seed=SEED)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    pairs = zip(copied.parameters(), model.parameters(), strict=True)
    assert all(a is not b and torch.equal(a, b) for a, b in pairs)


def test_bf16_differs_by_the_rounding_of_its_outputs_and_not_at_all_in_wgrad() -> None:
    model, captured, _ = captured_pass()
    for name, each in captured.items():
        found = distances("bf16", name, each, model)
        assert found["wgrad"].error == 0
        for gemm in ("fprop", "dgrad"):
            assert 0 < found[gemm].relative_error < 2**-8


def test_error_rises_from_fp8_to_nvfp4_to_mxfp4_in_every_gemm_of_every_linear() -> None:
    model, captured, _ = captured_pass()
    del captured["blocks.0.mamba.in_dt"]  # BF16 in every recipe
    for name, each in captured.items():
        fp8, nvfp4, mxfp4 = (
            distances(recipe, name, each, model) for recipe in ("fp8_block", "nvfp4_paper", "mxfp4")
        )
        for gemm in GEMM_NAMES:
            errors = [found[gemm].relative_error for found in (fp8, nvfp4, mxfp4)]
            assert errors == sorted(errors), (name, gemm, errors)
            assert 0.01 < errors[0] < 0.05 < errors[1] < 0.2
            cosines = [found[gemm].cosine for found in (mxfp4, nvfp4, fp8)]
            assert cosines == sorted(cosines), (name, gemm, cosines)
            assert 0.95 < cosines[0] < cosines[2] < 1


def with_outlier_tokens(channels: int, seed: int, size: float) -> Tensor:
    """Gaussian [2048, channels] in which one token of 16, at random, is `size` times larger."""
    is_outlier = torch.rand(2048, 1, generator=torch.Generator().manual_seed(9)) < 1 / 16
    x_TC = normal(2048, channels, seed=seed)
    return torch.where(is_outlier, size * x_TC, x_TC)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_rht_lowers_wgrad_s_error_where_tokens_are_outliers_in_both_operands(
    size: float,
) -> None:
    captured = Captured(
        with_outlier_tokens(64, 1, size).bfloat16(), with_outlier_tokens(96, 2, size).bfloat16()
    )
    assert kurtosis(captured.x_TK) > 10
    assert wgrad_error("nvfp4_paper", captured) < 0.9 * wgrad_error("no_rht", captured)


def test_the_rht_neither_helps_nor_harms_without_outliers() -> None:
    captured = Captured(normal(2048, 64, seed=1).bfloat16(), normal(2048, 96, seed=2).bfloat16())
    assert wgrad_error("nvfp4_paper", captured) == pytest.approx(
        wgrad_error("no_rht", captured), rel=0.05
    )


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("kind", ["gaussian", "heavy tails"])
def test_sr_s_bias_falls_with_the_root_of_the_draws_to_the_floor_of_its_rule(
    kind: str, guard: bool
) -> None:
    dy = normal(512, 256, seed=4)
    found = rounding_bias(dy if kind == "gaussian" else dy**3, [1, 4, 16, 64], KEY, guard=guard)
    for count, bias in found.bias.items():
        assert bias == pytest.approx(found.predicted(count), rel=0.04), count
    assert found.error == pytest.approx(found.predicted(1), rel=0.01)
    assert found.floor < (0.01 if guard else 0.15) * found.spread


def test_sr_has_less_bias_and_more_error_than_rounding_to_nearest() -> None:
    dy = normal(256, 96, seed=4)
    nearest, drawn = rounding_bias(dy, [1], None), rounding_bias(dy, [64], KEY)
    assert nearest.spread == 0
    assert nearest.bias[1] == pytest.approx(nearest.error)
    assert drawn.bias[64] < nearest.bias[1] / 4
    assert drawn.error > 1.3 * nearest.error


def test_the_floor_and_the_slope_are_those_of_the_cut_at_six() -> None:
    """On Gaussian data about -0.41% without the guard and -0.06% with it."""
    dy = normal(1024, 512, seed=5)
    plain, guarded = (rounding_bias(dy, [4], KEY, guard=guard) for guard in (False, True))
    assert plain.slope == pytest.approx(-0.0041, abs=6e-4)
    assert guarded.slope == pytest.approx(-0.0006, abs=4e-4)
    assert guarded.floor < 0.002 < 0.008 < plain.floor


def test_two_dimensional_scales_give_forward_and_backward_one_weight() -> None:
    w_NK = normal(96, 64, seed=6)
    assert weight_mismatch(w_NK, LINEAR_RECIPES["nvfp4"]) == 0
    assert 0.05 < weight_mismatch(w_NK, named_recipe("no_2d").default) < 0.3


def test_kurtosis_is_per_channel_along_the_tokens() -> None:
    assert kurtosis(normal(4096, 64, seed=7) * torch.logspace(-3, 3, 64)) == pytest.approx(3, 0.05)
    assert kurtosis(torch.ones(32, 4)) == 1
    one_outlier = torch.zeros(32, 2)
    one_outlier[5, 0] = 7.0
    assert kurtosis(one_outlier) == 32
    assert kurtosis(torch.zeros(32, 2)) == 0


def test_a_block_that_decodes_to_zero_is_a_bias_that_no_draw_removes() -> None:
    dy = torch.zeros(2, 32)
    dy[0, 0], dy[1, 3] = 1.0, 1e-7  # the scale of the second one's block is 0
    found = rounding_bias(dy, [2], KEY)
    assert found.bias[2] == pytest.approx(1e-7)
    assert found.predicted(2) == pytest.approx(1e-7)
