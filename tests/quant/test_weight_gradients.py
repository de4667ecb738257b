"""Wgrad that adds to the gradient itself leaves the bits that autograd's addition leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quant import Precision, apply_recipe, named_recipe

MICRO_BATCHES = 3


def one_linear(recipe: str) -> tuple[nn.Module, Precision]:
    torch.manual_seed(0)
    up = nn.Linear(96, 64, bias=False)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": up})])})
    kept = named_recipe(recipe).with_blocks(0, 0)
    return model, apply_recipe(model, kept, num_blocks=1, seed=3)


def backward(precision: Precision) -> Tensor:
    """The weight's gradient after some micro-batches."""
    layer = precision.layers["blocks.0.up"]
    for index in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(index)
        precision.begin(1, index)
        x = torch.randn(40, 96, generator=generator, requires_grad=True)
        layer(x).backward(torch.randn(40, 64, generator=generator))
        assert x.grad is not None
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.fixture
def products_added(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each GEMM, whether it was given something to add to."""
    from quant import linear

    added: list[bool] = []
    plain = linear.gemm

    def noted(a, b, backend=None, total=None):
        added.append(total is not None)
        return plain(a, b, backend, total)

    monkeypatch.setattr(linear, "gemm", noted)
    return added


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_paper", "mxfp8", "fp8_block"])
def test_the_sum_keeps_its_bits(recipe: str, products_added: list[bool]):
    _, precision = one_linear(recipe)
    wanted = backward(precision)
    assert not any(products_added)
    products_added.clear()
    _, precision = one_linear(recipe)
    precision.adds_weight_gradients = True
    assert torch.equal(backward(precision), wanted)
    assert sum(products_added) == MICRO_BATCHES - 1  # the first has nothing to add to
    assert wanted.dtype == torch.float32


def test_a_weight_with_a_hook_is_left_to_autograd():
    _, precision = one_linear("nvfp4_paper")
    precision.adds_weight_gradients = True
    seen: list[Tensor] = []
    weight = precision.layers["blocks.0.up"].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    total = backward(precision)
    assert len(seen) == MICRO_BATCHES
    assert torch.equal(seen[-1], total)
    _, precision = one_linear("nvfp4_paper")
    precision.adds_weight_gradients = True
    single: list[Tensor] = []
    precision.layers["blocks.0.up"].weight.register_hook(single.append)
    backward(precision)
    assert len(single) == MICRO_BATCHES


def test_statistics_of_weight_gradients_are_of_one_micro_batch():
    found = []
    for adds in (False, True):
        _, precision = one_linear("nvfp4_paper")
        precision.adds_weight_gradients = adds
        precision.statistics.request()
        backward(precision)
        found.append(precision.statistics.collect())
    assert found[0] == found[1]
    assert found[0]
