"""Reproducible sums: exact, within their stated error, and blind to who computed what."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.train.optim import build_optimizer
from pipeline.train.reduction import (
    SCALE,
    SUM_LIMIT,
    Reduction,
    ReproducibleReduction,
    in_fp32,
)
from pipeline.train.step import clip
from tests.train.test_schedule import train_config


class Holder(nn.Module):
    """Parameters of a matrix, a vector and a filter, whose gradients a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((13, 37), (29,), (11, 1, 4))
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def loss(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.parts, gradients, strict=True)) + 0.1


def draws(count: int, seed: int = 0) -> list[list[Tensor]]:
    """Gradients of so many micro-batches, over seven orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(p.shape, generator=generator)
            * 10 ** (7 * torch.rand(p.shape, generator=generator) - 8)
            for p in Holder().parts
        ]
        for _ in range(count)
    ]


def reduced(kind: Any, micro_batches: list[list[Tensor]], **settings: Any) -> tuple[Any, Any]:
    """The gradients that a reduction makes of them, and the reduction."""
    model = Holder()
    reduction = kind(model, **settings)
    for index, gradients in enumerate(micro_batches):
        reduction.backward(model.loss(gradients), last=index == len(micro_batches) - 1)
    return [gradient.clone() for gradient in reduction.finish()], reduction


def test_gradients_loss_and_norm_are_the_same_bits_in_every_order() -> None:
    micro_batches = draws(5)
    results = []
    for order in itertools.permutations(micro_batches):
        gradients, reduction = reduced(ReproducibleReduction, list(order), num_micro_batches=5)
        results.append([*gradients, reduction.loss, reduction.norm(gradients)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    plain = [reduced(Reduction, order)[0] for order in (micro_batches, micro_batches[::-1])]
    assert not all(torch.equal(a, b) for a, b in zip(*plain, strict=True))  # what it is for


def test_each_micro_batch_errs_by_at_most_half_a_quantum() -> None:
    micro_batches = draws(7)
    gradients, _ = reduced(ReproducibleReduction, micro_batches, num_micro_batches=7)
    for index, gradient in enumerate(gradients):
        exact = sum(item[index].double() for item in micro_batches)
        error = (gradient.double() - exact).abs()
        assert (error <= 7 * 0.5 / SCALE + exact.abs() * 2.0**-24).all()


def test_the_norm_is_right_whatever_the_scale_of_the_gradients() -> None:
    reduction = ReproducibleReduction(Holder(), num_micro_batches=1)
    for scale in (1e-30, 1e-12, 1.0, 1e12):
        gradients = [gradient * scale for gradient in draws(1)[0]]
        exact = torch.cat([gradient.flatten().double() for gradient in gradients]).norm()
        assert float(reduction.norm(gradients)) == pytest.approx(float(exact), rel=1e-6)
    assert reduction.norm([torch.zeros(3, 4)]) == 0
    for bad in (float("nan"), float("inf")):
        assert not torch.isfinite(reduction.norm([torch.ones(3), torch.tensor([1.0, bad])]))


def test_rows_given_apart_have_the_norm_of_the_whole() -> None:
    reduction = ReproducibleReduction(Holder(), num_micro_batches=1)
    whole = draws(1)[0]
    parts = [part for gradient in whole for part in gradient.split(3)]
    assert torch.equal(reduction.norm(whole), reduction.norm(parts[::-1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), SUM_LIMIT / 3])
def test_what_no_sum_can_hold_is_counted(bad: float) -> None:
    micro_batches = draws(3)
    micro_batches[1][0][4, 5] = bad
    _, reduction = reduced(ReproducibleReduction, micro_batches, num_micro_batches=3)
    assert reduction.outside == 1
    reduction.begin()
    assert reduction.outside == 0


def test_the_largest_gradients_allowed_do_not_overflow() -> None:
    largest = 0.999 * SUM_LIMIT / 4
    micro_batches = [[torch.full_like(p, largest) for p in Holder().parts] for _ in range(4)]
    gradients, reduction = reduced(ReproducibleReduction, micro_batches, num_micro_batches=4)
    assert reduction.outside == 0
    assert all(torch.allclose(g, torch.full_like(g, 4 * largest)) for g in gradients)


def test_fixed_point_and_back_is_the_identity_on_quanta() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 2.0**-50, -(2.0**-40), 3.5, 1023.0])
    reduction = ReproducibleReduction(Holder(), num_micro_batches=1)
    assert torch.equal(in_fp32(reduction.fixed(values.clone())), values)


@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_clipping_and_adamw_do_not_depend_on_how_rows_are_cut(rows: int) -> None:
    """Vector instructions take elements by eights; what they leave must come out the same."""
    steps = [gradients[0] for gradients in draws(3)]

    def train(cut: int) -> Tensor:
        module = nn.ParameterList([nn.Parameter(part) for part in torch.ones(13, 37).split(cut)])
        optimizer = build_optimizer(module, train_config())
        for whole in steps:
            parts = [part.clone() for part in whole.split(cut)]
            clip(parts, 0.01, torch.tensor(0.123))
            for parameter, part in zip(module, parts, strict=True):
                parameter.grad = part
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in module])

    assert torch.equal(train(rows), train(13))
