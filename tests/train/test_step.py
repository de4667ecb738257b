"""One step: the same gradients however the batch is cut, and a bad step taken nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model import HybridModel
from pipeline.data.stream import IGNORED, Batch
from pipeline.train.optim import build_optimizer
from pipeline.train.reduction import Reduction
from pipeline.train.step import StepResult, forward_backward, train_step
from quant import apply_recipe, named_recipe
from tests.train.test_optim import SHAPE
from tests.train.test_schedule import train_config


def batch(rows: int, seed: int = 0) -> Batch:
    """Rows of 16 tokens with labels of which a ragged share counts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, SHAPE.vocab_size, (rows, 16), generator=generator)
    labels = tokens.roll(-1, 1)
    keep = torch.rand(rows, 1, generator=generator)
    labels[torch.rand(rows, 16, generator=generator) > keep] = IGNORED
    documents = torch.zeros(rows, 16, dtype=torch.int32)
    return Batch(tokens, labels, documents, torch.zeros(rows, dtype=torch.int64), 0, rows)


def cut(whole: Batch, size: int) -> list[tuple[int, Batch]]:
    return [
        (
            index,
            Batch(
                whole.tokens_BT[rows],
                whole.labels_BT[rows],
                whole.seq_idx_BT[rows],
                whole.source_B[rows],
                index * size,
                size,
            ),
        )
        for index in range(whole.num_units // size)
        for rows in [slice(index * size, (index + 1) * size)]
    ]


def run_step(
    micro_batches: list[tuple[int, Batch]],
    recipe: str = "bf16",
    poison: bool = False,
    **settings: Any,
) -> tuple[HybridModel, StepResult, dict[str, torch.Tensor]]:
    """A step from the same start; the weights before it come last."""
    model = HybridModel(SHAPE, seed=1)
    precision = apply_recipe(model, named_recipe(recipe).with_blocks(0, 1), num_blocks=3, seed=0)
    optimizer = build_optimizer(model, train_config())
    if poison:
        with torch.no_grad():
            model.blocks[1].attention.qkv.weight[0, 0] = float("nan")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = train_step(
        model,
        precision,
        optimizer,
        micro_batches,
        step=3,
        learning_rate=0.1,
        clip_norm=1.0,
        **settings,
    )
    return model, result, before


def test_a_batch_cut_otherwise_gives_the_same_loss_and_gradient_norm() -> None:
    whole = batch(8)
    results = [run_step(cut(whole, size))[1] for size in (8, 4, 1)]
    for result in results[1:]:
        assert result.num_valid == results[0].num_valid
        assert result.loss == pytest.approx(results[0].loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-2)  # BF16 operands


def test_the_loss_is_the_mean_over_valid_tokens_of_the_global_batch() -> None:
    whole = batch(4)
    model = HybridModel(SHAPE, seed=1)
    apply_recipe(model, named_recipe("bf16"), num_blocks=3, seed=0)
    with torch.no_grad():
        total, count = model.loss(whole.tokens_BT, whole.labels_BT, whole.seq_idx_BT)
    assert run_step(cut(whole, 2))[1].loss == pytest.approx(float(total / count), rel=1e-5)


def test_a_step_with_a_non_finite_value_changes_nothing() -> None:
    model, result, before = run_step(cut(batch(4), 2), poison=True)
    assert not result.taken
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


def test_a_good_step_moves_every_parameter_that_has_a_gradient() -> None:
    model, result, before = run_step(cut(batch(4), 2))
    assert result.taken
    moved = [not torch.equal(p, before[name]) for name, p in model.named_parameters()]
    assert all(moved)


def test_the_update_uses_the_learning_rate_of_the_schedule() -> None:
    model, _, before = run_step(cut(batch(4), 2))
    largest = max(float((p.detach() - before[n]).abs().max()) for n, p in model.named_parameters())
    assert largest == pytest.approx(0.1, rel=0.05)  # Adam's first step is the learning rate


def test_a_quantized_step_repeats_to_the_bit_and_not_at_another_index() -> None:
    micro_batches = cut(batch(4), 2)
    first, again = (run_step(micro_batches, recipe="nvfp4_paper")[0] for _ in range(2))
    moved = [(index + 5, item) for index, item in micro_batches]
    other = run_step(moved, recipe="nvfp4_paper")[0]
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    differs = [
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    ]
    assert all(same)
    assert not all(differs)


def test_an_outlier_changes_nothing_and_its_reason_is_kept() -> None:
    seen: list[tuple[float, float]] = []

    def judge(loss: float, grad_norm: float) -> str:
        seen.append((loss, grad_norm))
        return "too high"

    model, result, before = run_step(cut(batch(4), 2), judge=judge)
    assert seen == [(result.loss, result.grad_norm)]
    assert (result.taken, result.skipped) == (False, "too high")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_what_is_not_finite_is_named_and_not_judged() -> None:
    def judge(loss: float, grad_norm: float) -> str:
        raise AssertionError("asked about a step that is bad already")

    result = run_step(cut(batch(4), 2), poison=True, judge=judge)[1]
    assert "loss nan" in result.skipped
    assert "gradient norm nan" in result.skipped
    counted = run_step(cut(batch(4), 2), recipe="nvfp4_paper", poison=True)[1]
    assert "non-finite quantizer inputs" in counted.skipped


def test_signals_ride_along() -> None:
    assert run_step(cut(batch(4), 2), signals=(1.0, 0.0))[1].signals == (1.0, 0.0)


def test_an_all_ignored_batch_has_no_loss_and_no_gradient() -> None:
    whole = batch(4)
    whole.labels_BT.fill_(IGNORED)
    _, result, _ = run_step(cut(whole, 2))
    assert (result.loss, result.grad_norm, result.num_valid) == (0.0, 0.0, 0)


def test_a_rank_without_a_micro_batch_takes_part_in_the_step_s_statistics() -> None:
    """Their sums over ranks are a collective: one that stays away would stop all."""
    model = HybridModel(SHAPE, seed=1)
    precision = apply_recipe(model, named_recipe("nvfp4").with_blocks(0, 1), num_blocks=3, seed=0)
    precision.statistics.every = 2
    for step, active in ((0, True), (1, False), (2, True)):
        forward_backward(model, precision, [], step, Reduction(model))
        assert precision.statistics.active == active
