"""The step oracle: one whole optimizer step of a small hybrid, slowly, in one process.

Forward and backward of every micro-batch, with each linear of `model` swapped for the three GEMMs
of ``linear.py``; gradients summed in FP32, the loss divided by the valid tokens of the global
batch, clipping by the global norm, AdamW by hand. Norms, convolution, scan and attention are the
model's own: the oracle is about precision and the step, not about the architecture.

Legend: T tokens of a micro-batch, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model import HybridModel, ModelConfig
from tests.oracle.linear import (
    Formats,
    Product,
    Rules,
    Site,
    backward_operands,
    forward_operands,
    gemm,
)
from tests.oracle.quantizers import Operand

IGNORED = -100
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class MicroBatch:
    """Tokens, shifted labels and document numbers, each [B, T]; ``index`` in the global batch."""

    index: int
    tokens: Tensor
    labels: Tensor
    seq_idx: Tensor


@dataclass(frozen=True)
class AdamW:
    """Loshchilov and Hutter, arXiv 1711.05101."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Moments:
    """AdamW's state by parameter name, FP32, and the updates done before this one."""

    first: Arrays
    second: Arrays
    count: int


@dataclass(frozen=True)
class Step:
    """All that one optimizer step depends on.

    ``num_valid``: the valid tokens of the global batch, where ``micro_batches`` are one rank's
    share of it; None where they are all of it.
    """

    config: ModelConfig
    weights: Mapping[str, np.ndarray]
    micro_batches: Sequence[MicroBatch]
    seed: int
    step: int
    formats: Mapping[str, Formats]
    adamw: AdamW
    clip_norm: float
    moments: Moments | None = None
    num_valid: int | None = None


@dataclass
class Record:
    """One linear in one micro-batch.

    ``tensors``: x, y, dy, dx, FP32 [T, K or N]; ``operands``: x, w, dy, w_t, dy_t, x_t as the
    GEMMs read them, bytes included; ``products``: y, dx, dw before any rounding.
    """

    tensors: Arrays = field(default_factory=dict)
    operands: dict[str, Operand] = field(default_factory=dict)
    products: dict[str, Product] = field(default_factory=dict)


Place = tuple[str, int]
"""A linear's name and the micro-batch's index."""


@dataclass
class Passes:
    """What forward and backward passes give. ``losses`` holds the summed loss of each micro-batch;
    ``gradients`` a dictionary per micro-batch, each the sum up to and with that one."""

    records: dict[Place, Record]
    losses: list[float]
    num_valid: int
    gradients: list[Arrays]


@dataclass
class Outcome(Passes):
    """Every figure of the step; ``clipped`` is what AdamW sees."""

    grad_norm: float
    clipped: Arrays
    weights: Arrays
    moments: Moments


class Course:
    """Decides with which values the step goes on: here, with the oracle's own."""

    def meets(self, place: Place, what: str, value_TC: np.ndarray) -> np.ndarray:
        """The x or dy that a linear goes on with, having been given ``value``."""
        return value_TC

    def takes(self, place: Place, what: str, product_TC: Product) -> np.ndarray:
        """The y or dx that a linear hands on, FP32 holding BF16 values."""
        return product_TC.bf16()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, leaf: _Leaf) -> Tensor:
        ctx.leaf, ctx.site = leaf, leaf.oracle.site(leaf.layer)
        ctx.record = leaf.oracle.records.setdefault((leaf.name, ctx.site.microbatch), Record())
        ctx.save_for_backward(weight)
        return leaf.fprop(ctx.record, ctx.site, x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return *ctx.leaf.backward_gemms(ctx.record, ctx.site, weight, dy), None


class _Leaf(nn.Module):
    """Stands where the model has a linear, on the same Parameter."""

    def __init__(self, oracle: _Pass, name: str, layer: int, linear: nn.Linear) -> None:
        super().__init__()
        self.oracle, self.name, self.layer = oracle, name, layer
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self)

    def fprop(self, record: Record, site: Site, x: Tensor, weight: Tensor) -> Tensor:
        rules, course = self.oracle.rules, self.oracle.course
        x_TK = x.detach().flatten(0, -2).numpy().copy()
        x_TK = course.meets((self.name, site.microbatch), "x", x_TK)
        w_NK = rules.weight(self.name, weight.detach().numpy())
        operands = forward_operands(self.oracle.formats[self.name].forward, x_TK, w_NK)
        product = gemm(operands["x"], operands["w"], rules)
        y_TN = course.takes((self.name, site.microbatch), "y", product)
        record.tensors |= {"x": x_TK, "y": y_TN}
        record.operands |= operands
        record.products["y"] = product
        return torch.from_numpy(y_TN.copy()).view(*x.shape[:-1], -1)

    def backward_gemms(
        self, record: Record, site: Site, weight: Tensor, dy: Tensor
    ) -> tuple[Tensor, Tensor]:
        rules, course = self.oracle.rules, self.oracle.course
        dy_TN = dy.flatten(0, -2).numpy().copy()
        dy_TN = course.meets((self.name, site.microbatch), "dy", dy_TN)
        x_TK = record.tensors["x"]
        w_NK = rules.weight(self.name, weight.detach().numpy())
        format = self.oracle.formats[self.name].backward
        operands = backward_operands(format, x_TK, w_NK, dy_TN, site, rules)
        product = gemm(operands["dy"], operands["w_t"], rules)
        dw = rules.weight_gradient(gemm(operands["dy_t"], operands["x_t"], rules))
        dx_TK = course.takes((self.name, site.microbatch), "dx", product)
        record.tensors |= {"dy": dy_TN, "dx": dx_TK}
        record.operands |= operands
        record.products |= {"dx": product, "dw": dw}
        return torch.from_numpy(dx_TK.copy()).view(*dy.shape[:-1], -1), torch.from_numpy(dw.fp32())


class _Pass:
    """The forward and backward passes of a step, up to the summed gradients."""

    def __init__(self, step: Step, rules: Rules, course: Course) -> None:
        self.step, self.rules, self.course = step, rules, course
        self.formats = step.formats
        self.records: dict[Place, Record] = {}
        self.microbatch = 0
        self.model = HybridModel(step.config)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.tensor(step.weights[name]))
        linears = linear_names(self.model)
        assert set(linears) == set(step.formats)
        for layer, name in enumerate(linears):
            linear = self.model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            self.model.set_submodule(name, _Leaf(self, name, layer, linear))

    def site(self, layer: int) -> Site:
        return Site(self.step.seed, self.step.step, self.microbatch, layer)

    def run(self) -> Passes:
        losses, gradients = [], []
        num_valid = self.step.num_valid or count_valid(self.step.micro_batches)
        for micro_batch in self.step.micro_batches:
            self.microbatch = micro_batch.index
            loss, _ = self.model.loss(micro_batch.tokens, micro_batch.labels, micro_batch.seq_idx)
            (loss / num_valid).backward()
            losses.append(loss.item())
            gradients.append(self.summed_gradients())
        return Passes(self.records, losses, num_valid, gradients)

    def summed_gradients(self) -> Arrays:
        summed = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            summed[name] = parameter.grad.numpy().copy()
        return summed


def linear_names(model: nn.Module) -> list[str]:
    """Every linear, in the order that numbers the layers."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def count_valid(micro_batches: Iterable[MicroBatch]) -> int:
    return sum(int((micro_batch.labels != IGNORED).sum()) for micro_batch in micro_batches)


def run_passes(step: Step, rules: Rules | None = None, course: Course | None = None) -> Passes:
    """The step up to its gradients; also of a share of the global batch, and an empty one."""
    return _Pass(step, rules or Rules(), course or Course()).run()


def run_step(step: Step, rules: Rules | None = None, course: Course | None = None) -> Outcome:
    """The whole step."""
    passes = run_passes(step, rules, course)
    grad_norm = global_norm(passes.gradients[-1])
    clipped = clip(passes.gradients[-1], grad_norm, step.clip_norm)
    weights, moments = adamw(step, clipped)
    return Outcome(
        **vars(passes), grad_norm=grad_norm, clipped=clipped, weights=weights, moments=moments
    )


def global_norm(gradients: Arrays) -> float:
    return float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients.values())))


def clip(gradients: Arrays, norm: float, clip_norm: float) -> Arrays:
    """Scaled down so that the global norm does not exceed ``clip_norm``."""
    factor = min(1.0, clip_norm / norm)
    return {name: (g * factor).astype(np.float32) for name, g in gradients.items()}


def decays(name: str, value: np.ndarray) -> bool:
    """Matrices of linears and the embedding; not the convolution's filters, nor any vector."""
    return value.ndim == 2 and not name.endswith("conv.weight")


def adamw(step: Step, gradients: Arrays) -> tuple[Arrays, Moments]:
    """New weights and moments, computed in FP64 and rounded once to FP32."""
    settings = step.adamw
    before = step.moments or Moments(
        {name: np.zeros_like(g) for name, g in gradients.items()},
        {name: np.zeros_like(g) for name, g in gradients.items()},
        count=0,
    )
    count = before.count + 1
    weights, first, second = {}, {}, {}
    for name, gradient in gradients.items():
        g, weight = gradient.astype(np.float64), step.weights[name].astype(np.float64)
        m = settings.beta1 * before.first[name] + (1 - settings.beta1) * g
        v = settings.beta2 * before.second[name] + (1 - settings.beta2) * g * g
        unbiased_m = m / (1 - settings.beta1**count)
        unbiased_v = v / (1 - settings.beta2**count)
        if decays(name, weight):
            weight = weight * (1 - settings.learning_rate * settings.weight_decay)
        update = unbiased_m / (np.sqrt(unbiased_v) + settings.epsilon)
        weights[name] = (weight - settings.learning_rate * update).astype(np.float32)
        first[name], second[name] = m.astype(np.float32), v.astype(np.float32)
    return weights, Moments(first, second, count)
