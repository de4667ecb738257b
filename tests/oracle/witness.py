"""What the pipeline's own training step did, seen from outside through PyTorch's public hooks.

Legend: T tokens of a micro-batch, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    ``reduced``: the gradients after the sum over ranks; ``clipped``: those that the optimizer was
    given. ``repeats``: recomputed calls. ``frames``: how often torch.compile had worked when each
    micro-batch began, and at the end.
    """

    weights_before: Arrays
    moments_before: Moments | None
    micro_batches: list[MicroBatch]
    result: StepResult | None = None
    calls: dict[Place, Arrays] = field(default_factory=dict)
    gradients: list[Arrays] = field(default_factory=list)
    reduced: Arrays = field(default_factory=dict)
    clipped: Arrays = field(default_factory=dict)
    weights_after: Arrays = field(default_factory=dict)
    repeats: int = 0
    frames: list[int] = field(default_factory=list)


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def parameters(model: nn.Module) -> Arrays:
    return {name: array(parameter) for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> Arrays:
    named = model.named_parameters()
    return {name: array(parameter.grad) for name, parameter in named if parameter.grad is not None}


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


Hook = Callable[..., Any]


class Watch:
    """Sees the steps of one model. Its hooks stay, and outside the graphs of a ``compiled`` model,
    so that no step makes torch.compile work anew for their sake."""

    def __init__(
        self,
        model: HybridModel,
        precision: Precision,
        optimizer: torch.optim.Optimizer,
        compiled: bool = False,
    ) -> None:
        outside: Callable[[Hook], Hook] = torch.compiler.disable if compiled else lambda hook: hook
        self.compiled = compiled
        self.model, self.precision, self.optimizer = model, precision, optimizer
        self.witness: Witness
        model.embedding.register_forward_pre_hook(outside(self._begin))
        optimizer.register_step_pre_hook(self._given_to_optimizer)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._summed, name))
        for name in precision.layers:
            linear = model.get_submodule(name)
            linear.register_forward_pre_hook(outside(partial(self._before, name)))
            linear.register_forward_hook(outside(partial(self._after, name)))

    def step(self, micro_batches: Sequence[tuple[int, Batch]], **settings: Any) -> Witness:
        """Run ``train_step`` and note all that it does."""
        batches = [
            MicroBatch(i, b.tokens_BT.cpu(), b.labels_BT.cpu(), b.seq_idx_BT.cpu())
            for i, b in micro_batches
        ]
        before = parameters(self.model), moments(self.model, self.optimizer)
        self.witness = Witness(*before, batches)
        self.witness.result = train_step(
            self.model,
            self.precision,
            self.optimizer,
            micro_batches,
            judge=self._reduced,
            **settings,
        )
        self._note_frames()
        self.witness.weights_after = parameters(self.model)
        return self.witness

    def _begin(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            expected = self.witness.micro_batches[len(self.witness.gradients)].tokens
            assert torch.equal(args[0].cpu(), expected)
            self.witness.gradients.append({})
            self._note_frames()

    def _note_frames(self) -> None:
        if self.compiled:
            self.witness.frames.append(torch._dynamo.utils.counters["frames"]["total"])

    def _summed(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        self.witness.gradients[-1][name] = array(parameter.grad)

    def _reduced(self, loss: float, grad_norm: float) -> str:
        self.witness.reduced = gradients(self.model)
        return ""

    def _given_to_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.witness.clipped = gradients(self.model)

    def _before(
        self, name: str, module: nn.Module, args: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        """The input passes through a view of itself, whose gradient is this linear's alone, also
        where several linears read one tensor."""
        if not torch.is_grad_enabled():
            return None
        values, x = self._call(name), args[0].view_as(args[0])
        self._note(name, values, "x", x)
        if x.requires_grad:
            x.register_hook(lambda grad: self._note(name, values, "dx", grad))
        return (x,)

    def _after(self, name: str, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        if torch.is_grad_enabled():
            values = self._call(name)
            self._note(name, values, "y", y)
            if y.requires_grad:
                y.register_hook(lambda grad: self._note(name, values, "dy", grad))

    def _call(self, name: str) -> Arrays:
        micro_batch = self.witness.micro_batches[len(self.witness.gradients) - 1]
        return self.witness.calls.setdefault((name, micro_batch.index), {})

    def _note(self, name: str, values: Arrays, what: str, tensor: Tensor) -> None:
        value = array(tensor.flatten(0, -2))
        if what in values:
            self.witness.repeats += 1
            assert np.array_equal(values[what], value), f"a recompute of {name} changed its {what}"
        values[what] = value
