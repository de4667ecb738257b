"""What the pipeline's own training step did, seen from outside through PyTorch's public hooks.

Legend: T tokens of a micro-batch, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model import HybridModel
from pipeline.data.stream import Batch
from pipeline.train.step import StepResult, train_step
from quant import Precision
from tests.oracle.step import Arrays, MicroBatch, Moments, Place


@dataclass
class Witness:
    """One step as it happened.

    ``calls``: x, y, dy and dx of each linear in each micro-batch, FP32 [T, K or N].
    ``gradients``: per micro-batch, in order, each parameter's gradient summed so far.
    ``clipped``: the gradients that the optimizer was given. ``repeats``: recomputed calls.
    """

    weights_before: Arrays
    moments_before: Moments | None
    micro_batches: list[MicroBatch]
    result: StepResult | None = None
    calls: dict[Place, Arrays] = field(default_factory=dict)
    gradients: list[Arrays] = field(default_factory=list)
    clipped: Arrays = field(default_factory=dict)
    weights_after: Arrays = field(default_factory=dict)
    repeats: int = 0


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


def parameters(model: nn.Module) -> Arrays:
    return {name: array(parameter) for name, parameter in model.named_parameters()}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Moments | None:
    """AdamW's state by parameter name; None before the first update."""
    if not optimizer.state:
        return None
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return Moments(
        {name: array(values["exp_avg"]) for name, values in state.items()},
        {name: array(values["exp_avg_sq"]) for name, values in state.items()},
        count=int(next(iter(state.values()))["step"]),
    )


def witness_step(
    model: HybridModel,
    precision: Precision,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[int, Batch]],
    **settings: Any,
) -> Witness:
    """Run ``train_step`` and note all that it does."""
    batches = [MicroBatch(i, b.tokens_BT, b.labels_BT, b.seq_idx_BT) for i, b in micro_batches]
    witness = Witness(parameters(model), moments(model, optimizer), batches)
    hooks = _watch(model, list(precision.layers), optimizer, witness)
    try:
        witness.result = train_step(model, precision, optimizer, micro_batches, **settings)
    finally:
        for hook in hooks:
            hook.remove()
    witness.weights_after = parameters(model)
    return witness


def _watch(
    model: HybridModel, linears: list[str], optimizer: torch.optim.Optimizer, witness: Witness
) -> list[Any]:
    def begin(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        expected = witness.micro_batches[len(witness.gradients)].tokens
        assert torch.equal(args[0], expected)
        witness.gradients.append({})

    def given_to_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            witness.clipped[name] = array(parameter.grad)

    hooks: list[Any] = [
        model.embedding.register_forward_pre_hook(begin),
        optimizer.register_step_pre_hook(given_to_optimizer),
    ]
    for name, parameter in model.named_parameters():

        def summed(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            witness.gradients[-1][name] = array(parameter.grad)

        hooks.append(parameter.register_post_accumulate_grad_hook(summed))
    for name in linears:
        hooks += _watch_linear(name, model.get_submodule(name), witness)
    return hooks


def _watch_linear(name: str, linear: nn.Module, witness: Witness) -> list[Any]:
    """Note x, y, dy and dx. The input passes through a view of itself, whose gradient is this
    linear's alone, also where several linears read one tensor."""

    def call() -> Arrays:
        micro_batch = witness.micro_batches[len(witness.gradients) - 1]
        return witness.calls.setdefault((name, micro_batch.index), {})

    def note(values: Arrays, what: str, tensor: Tensor) -> None:
        value = array(tensor.flatten(0, -2))
        if what in values:
            witness.repeats += 1
            assert np.array_equal(values[what], value), f"a recompute of {name} changed its {what}"
        values[what] = value

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values, x = call(), args[0].view_as(args[0])
        note(values, "x", x)
        if x.requires_grad:
            x.register_hook(lambda grad: note(values, "dx", grad))
        return (x,)

    def after(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        values = call()
        note(values, "y", y)
        if y.requires_grad:
            y.register_hook(lambda grad: note(values, "dy", grad))

    return [linear.register_forward_pre_hook(before), linear.register_forward_hook(after)]
