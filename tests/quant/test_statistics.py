"""Statistics say what quantization did, only when asked."""

from __future__ import annotations

import pytest
import torch

from quant import MXFP4, NVFP4, Statistics, apply_recipe, named_recipe, quantize
from quant.recipe import ROLES
from tests.quant.toy_hybrid import ToyHybrid, batch


def measured(x: torch.Tensor, format=NVFP4) -> dict[str, float]:  # type: ignore[no-untyped-def]
    statistics = Statistics()
    statistics.operand("layer", "input", x, quantize(x, format))
    return {name.removeprefix("layer/input/"): v for name, v in statistics.collect().items()}


def test_each_statistic_on_a_tensor_made_for_it() -> None:
    x = torch.zeros(4, 16)
    x[0, :2] = torch.tensor([6.0, 0.1])  # saturated; 0.1 falls under half of the least code
    x[1, 0] = 1e-4  # 2688 * 1e-4 / 36 = 0.0075: an E4M3 subnormal
    x[2, :3] = 1e-7  # 7.5e-6: under half of the least E4M3, so scale 0
    found = measured(x)
    assert found["scale_saturated"] == 1 / 4
    assert found["scale_subnormal"] == 1 / 4
    assert found["scale_zero"] == 2 / 4
    assert found["flushed"] == (1 + 3) / 64
    assert found["nonfinite"] == 0


def test_the_error_of_gaussian_data_is_the_known_one() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    assert measured(x)["error"] ** 2 == pytest.approx(9.0e-3, rel=0.02)


def test_mx_scales_have_no_subnormals_and_zero_blocks_the_least_scale() -> None:
    x = torch.ones(2, 32)
    x[1] = 0
    found = measured(x, MXFP4)
    assert (found["scale_zero"], found["scale_subnormal"], found["scale_saturated"]) == (0.5, 0, 0)


def test_non_finite_elements_are_counted() -> None:
    x = torch.ones(2, 16)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    assert measured(x)["nonfinite"] == 2


def test_micro_batches_are_averaged_and_zero_weight_gradients_counted() -> None:
    statistics = Statistics()
    gradient = torch.ones(4, 4)
    statistics.weight_gradient("layer", gradient)
    gradient = gradient.clone()
    gradient[0] = 0
    statistics.weight_gradient("layer", gradient)
    assert statistics.collect() == {"layer/weight_gradient/zero": 4 / 32}
    assert statistics.collect() == {}


def steps(count: int, every: int = 0, request_after: int | None = None) -> list[dict[str, float]]:
    model = ToyHybrid()
    recipe = named_recipe("nvfp4_paper").with_blocks(1, 0)
    precision = apply_recipe(model, recipe, num_blocks=4, seed=0)
    precision.statistics.every = every
    taken = []
    for step in range(1, count + 1):
        for microbatch in range(2):
            precision.begin(step, microbatch)
            model(batch(seed=microbatch)).square().mean().backward()
            with torch.no_grad():
                model(batch())
        taken.append(precision.statistics.collect())
        if step == request_after:
            precision.statistics.request()
    return taken


def test_every_nth_step_is_measured_for_every_operand() -> None:
    taken = steps(5, every=2)
    assert [bool(t) for t in taken] == [False, True, False, True, False]
    quantized = ("blocks.1.ffn.up", "blocks.1.ffn.down", "blocks.2.attention.qkv")
    for layer in quantized:
        for role in ROLES:
            assert 0.01 < taken[1][f"{layer}/{role}/error"] < 0.3
        assert f"{layer}/weight_gradient/zero" in taken[1]
    assert not any(name.startswith("blocks.0.mamba.out/input") for name in taken[1])
    assert taken[1]["blocks.0.mamba.out/weight_gradient/zero"] == 0


def test_a_request_holds_for_one_step() -> None:
    assert [bool(t) for t in steps(4, request_after=2)] == [False, False, True, False]


def test_measuring_changes_no_bit() -> None:
    def gradient(every: int) -> torch.Tensor:
        model = ToyHybrid()
        recipe = named_recipe("nvfp4_paper").with_blocks(1, 0)
        precision = apply_recipe(model, recipe, num_blocks=4, seed=0)
        precision.statistics.every = every
        precision.begin(1, 0)
        model(batch()).square().mean().backward()
        gradient = model.blocks[1].ffn.up.weight.grad
        assert isinstance(gradient, torch.Tensor)
        return gradient

    assert torch.equal(gradient(0), gradient(1))
