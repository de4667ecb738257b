"""What a quantized linear depends on: keys, modes, the recompute, the weight's version."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import quant.linear as linear_module
import quant.weight_cache as cache_module
from quant import NVFP4, NVFP4_2D, QuantLinear, apply_recipe, named_recipe, quantize
from quant.gemm import bf16_matmul, gemm
from quant.weight_cache import WeightCache
from tests.quant.toy_hybrid import (
    ToyHybrid,
    batch,
    build,
    gradients,
    loss,
    normal,
    one_linear,
    recorded_copies,
    run,
    weight_gradient,
)

# Randomness


def test_equal_keys_give_equal_bits_and_other_keys_others() -> None:
    model, precision = build()

    def at(step: int, microbatch: int) -> dict[str, Tensor]:
        model.zero_grad()
        precision.begin(step, microbatch)
        loss(model, 1).backward()
        return gradients(model)

    first = at(4, 1)
    at(5, 0)
    again, other_step, other_microbatch = at(4, 1), at(5, 1), at(4, 2)
    for name, gradient in first.items():
        assert torch.equal(gradient, again[name])
        if "in_dt" not in name and "head" not in name:
            assert not torch.equal(gradient, other_step[name])
            assert not torch.equal(gradient, other_microbatch[name])


def test_accumulated_micro_batches_equal_the_sum_of_separate_ones() -> None:
    model, precision = build()
    parts = []
    for microbatch in range(2):
        model.zero_grad()
        precision.begin(0, microbatch)
        loss(model, microbatch).backward()
        parts.append(gradients(model))
    model.zero_grad()
    for microbatch in range(2):
        precision.begin(0, microbatch)
        loss(model, microbatch).backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, parts[0][name] + parts[1][name])


def test_stochastic_rounding_without_a_step_is_refused() -> None:
    model = ToyHybrid()
    apply_recipe(model, named_recipe("nvfp4").with_blocks(0, 0), num_blocks=4, seed=0)
    with torch.no_grad():
        model(batch())
    with pytest.raises(ValueError, match=r"call Precision\.begin\(step, microbatch\)"):
        model(batch()).sum().backward()


def test_the_mean_of_many_input_gradients_is_near_exact() -> None:
    layer, precision = one_linear("guard_16_17")
    x, dy = normal(32, 64, seed=1), normal(32, 96, seed=2)
    exact = dy @ quantize(layer.weight, NVFP4_2D).dequantize()
    draws = []
    for step in range(200):
        precision.begin(step, 0)
        draws.append(run(layer, x, dy)[1])
    mean = torch.stack(draws).mean(0)
    one, many = ((d - exact).norm() / exact.norm() for d in (draws[0], mean))
    assert one > 0.1
    assert many < 1.5 * one / 200**0.5


def test_the_two_copies_of_a_symmetric_gradient_err_independently() -> None:
    layer, _ = one_linear("no_rht", 64, 128)
    dy = normal(128, 128, seed=2)
    dy = dy + dy.t()
    with recorded_copies() as made:
        run(layer, normal(128, 64, seed=1), dy)
    gradient, row, column = made[1]
    assert torch.equal(row.scales.float(), column.scales.float())
    errors = torch.stack([(q.dequantize() - gradient).flatten() for q in (row, column)])
    assert errors.norm() > 0
    assert abs(torch.corrcoef(errors)[0, 1].item()) < 0.04  # five sigma of 128^2 pairs


def test_two_layers_draw_independent_bits() -> None:
    _, precision = build("no_rht")
    dy = normal(32, 64, seed=2)
    errors = []
    with recorded_copies() as made:
        for name in ("blocks.1.ffn.down", "blocks.3.ffn.down"):
            run(precision.layers[name], normal(32, 128, seed=1), dy)
    for gradient, row, _ in (made[1], made[3]):
        errors.append((row.dequantize() - gradient).flatten())
    assert abs(torch.corrcoef(torch.stack(errors))[0, 1].item()) < 0.12


# Recompute and modes


def checkpointed(model: ToyHybrid, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return model.head(x)


@pytest.mark.parametrize("recipe", ["nvfp4_paper", "mxfp4", "fp8_block", "bf16"])
def test_checkpointing_changes_no_gradient_by_a_bit(recipe: str) -> None:
    model, _ = build(recipe)
    loss(model, 1).backward()
    plain = gradients(model)
    model.zero_grad()
    checkpointed(model, batch()).square().mean().backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, plain[name]), name


@pytest.mark.parametrize("mode", ["recipe", "bf16", "bf16_forward"])
def test_a_recompute_repeats_the_precision_of_its_forward_pass(mode: str) -> None:
    """The backward pass runs after the override ended, and after an evaluation in another mode."""
    model, precision = build()
    with precision.override(mode):
        loss(model, 1).backward()
    plain = gradients(model)
    model.zero_grad()
    seen: list[tuple[str, str]] = []
    original = linear_module._Call.fprop

    def record(call: linear_module._Call, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append((call.layer.name, call.recipe.fprop))
        return original(call, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module._Call, "fprop", record)
        with precision.override(mode):
            value = checkpointed(model, batch()).square().mean()
        forward, seen[:] = sorted(s for s in seen if s[0] != "head"), []
        other = "bf16" if mode != "bf16" else "recipe"
        with precision.override(other), torch.no_grad():
            model(batch())
        seen.clear()
        precision.mode = other
        value.backward()
    assert sorted(seen) == forward
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, plain[name]), name


def test_reentrant_checkpointing_is_refused() -> None:
    model, _ = build()
    x = batch().requires_grad_()
    y = checkpoint(model.blocks[1], x, use_reentrant=True)
    with pytest.raises(ValueError, match=r"blocks\.1\.ffn\.up is recomputed.*use_reentrant=False"):
        y.sum().backward()


def test_bf16_forward_is_a_bf16_linear_whose_backward_pass_is_the_recipes() -> None:
    x, dy = normal(48, 64, seed=1), normal(48, 96, seed=2)
    quantized, precision = one_linear("nvfp4_paper")
    bf16, _ = one_linear("bf16")
    _, dx_quantized = run(quantized, x, dy)
    dw_quantized = weight_gradient(quantized).clone()
    quantized.weight.grad = None
    y_bf16, dx_bf16 = run(bf16, x, dy)
    with precision.override("bf16_forward"):
        y, dx = run(quantized, x, dy)
    assert torch.equal(y, y_bf16)
    assert torch.equal(dx, dx_quantized)
    assert torch.equal(weight_gradient(quantized), dw_quantized)
    assert not torch.equal(dx, dx_bf16)


def test_a_switch_there_and_back_changes_nothing() -> None:
    model, precision = build()

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        precision.begin(2, 0)
        loss(model, 1).backward()
        return gradients(model)

    before = step()
    for mode in ("bf16", "bf16_forward"):
        precision.mode = mode
        step()
    precision.mode = "recipe"
    assert all(torch.equal(before[name], after) for name, after in step().items())


# The weight


def test_the_weight_is_quantized_once_a_step_and_again_after_the_optimizer() -> None:
    layer, precision = one_linear()
    calls = []
    original = cache_module.quantize

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(args)
        return original(*args, **kwargs)

    optimizer = torch.optim.SGD([layer.weight], lr=0.5)
    x, dy = normal(16, 64, seed=1), normal(16, 96, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "quantize", counted)
        for step in range(2):
            for microbatch in range(3):
                precision.begin(step, microbatch)
                y, _ = run(layer, x, dy)
            assert len(calls) == step + 1
            expected = gemm(quantize(x, NVFP4), quantize(layer.weight, NVFP4_2D), "emulated")
            assert torch.equal(y, expected.bfloat16().float())
            optimizer.step()
            optimizer.zero_grad()


def change_in_place(layer: QuantLinear) -> None:
    with torch.no_grad():
        layer.weight.mul_(-2)


def load(layer: QuantLinear) -> None:
    layer.load_state_dict({"weight": layer.weight.detach() * -2})


def load_by_assignment(layer: QuantLinear) -> None:
    layer.load_state_dict({"weight": layer.weight.detach() * -2}, assign=True)


def optimizer_step(layer: QuantLinear) -> None:
    layer.weight.grad = layer.weight.detach() * 3
    torch.optim.SGD([layer.weight], lr=1.0).step()


@pytest.mark.parametrize("change", [change_in_place, load, load_by_assignment, optimizer_step])
def test_a_changed_weight_is_quantized_anew_within_the_same_step(
    change: Callable[[QuantLinear], None],
) -> None:
    layer, _ = one_linear()
    x = normal(16, 64, seed=1)
    with torch.no_grad():
        before = layer(x)
    change(layer)
    with torch.no_grad():
        assert torch.equal(layer(x), -2 * before)


def test_a_new_weight_at_the_address_of_an_old_one_is_quantized() -> None:
    cache = WeightCache()
    for seed in range(20):
        w = normal(64, 64, seed=seed)  # freed in each round, and its memory given out again
        q, _ = cache.get(w, NVFP4_2D, along_n=False, step=0)
        assert torch.equal(q.codes, quantize(w, NVFP4_2D).codes)
        del w
    cache.clear()
    assert cache.nbytes == 0


def test_a_weight_changed_behind_autograds_back_needs_invalidate() -> None:
    layer, precision = one_linear()
    x = normal(16, 64, seed=1)
    with torch.no_grad():
        before = layer(x)
        layer.weight.data.mul_(-2)
        precision.invalidate()
        assert torch.equal(layer(x), -2 * before)


def test_changing_the_weight_between_forward_and_backward_is_an_error() -> None:
    layer, _ = one_linear()
    y = layer(normal(16, 64, seed=1))
    change_in_place(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_shards_quantized_with_the_whole_weights_amax_are_rows_of_the_whole() -> None:
    w = normal(64, 64, seed=4)
    w[50, 3] = 9.0
    amax = w.abs().max()
    whole = quantize(w, NVFP4_2D)
    shards = [quantize(part, NVFP4_2D, amax=amax) for part in w.chunk(2)]
    assert torch.equal(torch.cat([s.codes for s in shards]), whole.codes)
    scales = torch.cat([s.scales.float() for s in shards])
    assert torch.equal(scales, whole.scales.float())
    assert all(torch.equal(s.global_scale, whole.global_scale) for s in shards)


# Non-finite values


def test_non_finite_values_are_counted_once_and_evaluation_is_not() -> None:
    layer, precision = one_linear()
    x, dy = normal(32, 64, seed=1), normal(32, 96, seed=2)
    run(layer, x, dy)
    assert precision.nonfinite() == 0
    x[3, 5], x[4, 0] = float("nan"), float("inf")
    run(layer, x, dy)
    assert precision.nonfinite() == 2
    assert precision.nonfinite() == 0
    dy[0, 0] = -float("inf")
    run(layer, normal(32, 64, seed=1), dy)
    assert precision.nonfinite() == 1
    with torch.no_grad():
        layer(x)
    assert precision.nonfinite() == 0
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    run(layer, normal(32, 64, seed=1), normal(32, 96, seed=2))
    assert precision.nonfinite() == 1


# Surroundings


def test_a_copied_model_is_a_model_of_its_own() -> None:
    model, _ = build()
    with torch.no_grad():
        before = model(batch())
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(twin(batch()), torch.zeros_like(before))
        assert torch.equal(model(batch()), before)


def test_bf16_matmul_restores_the_setting() -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    with bf16_matmul(True):
        assert settings.fp32_precision == "bf16"
    assert settings.fp32_precision == before
    with pytest.raises(RuntimeError), bf16_matmul(True):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert settings.fp32_precision == before


@pytest.mark.slow
def test_torch_compile_leaves_the_bits_alone() -> None:
    model, precision = build()
    compiled_model, compiled_precision = build()
    compiled = torch.compile(compiled_model, backend="eager")
    for step in range(3):
        for handle, call in ((compiled_precision, compiled), (precision, model)):
            handle.begin(step, 0)
            call(batch()).square().mean().backward()
    for (name, mine), other in zip(
        gradients(model).items(), gradients(compiled_model).values(), strict=True
    ):
        assert torch.equal(mine, other), name
