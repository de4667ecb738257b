"""One optimizer step: forward and backward of every micro-batch, then a decision made once.

The loss is the sum over valid tokens divided by their count in the whole global batch, over all
micro-batches and ranks; so gradients do not depend on how a batch is cut. Whether the step is
taken is decided from reduced numbers, the same on every rank, before the optimizer runs: a
non-finite loss, gradient norm or quantizer input skips it everywhere, and so does an outlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model import HybridModel
from pipeline.data.stream import Batch
from pipeline.train.parallel import all_reduce
from pipeline.train.reduction import Reduction
from quant import Precision

MicroBatches = Sequence[tuple[int | None, Batch]]
"""Each with its index in the global batch; None for an empty one, without labels, that keeps this
rank in step with ranks that have one more."""


@dataclass(frozen=True)
class StepResult:
    """What a step found, the same on every rank.

    skipped: why no update was made, in words; empty where one was.
    signals: the sums over ranks of what each gave.
    """

    loss: float  # nats a token, mean over the global batch
    grad_norm: float  # L2, before clipping
    num_valid: int  # tokens that count
    nonfinite: int  # non-finite elements that quantizers were given
    skipped: str
    signals: tuple[float, ...] = ()

    @property
    def taken(self) -> bool:
        """Whether the optimizer ran."""
        return not self.skipped


def train_step(
    model: HybridModel,
    precision: Precision,
    optimizer: torch.optim.Optimizer,
    micro_batches: MicroBatches,
    *,
    step: int,
    learning_rate: float,
    clip_norm: float,
    judge: Callable[[float, float], str] = lambda loss, grad_norm: "",
    signals: Sequence[float] = (),
    reduction: Reduction | None = None,
    before_sums: Callable[[], None] = lambda: None,
    enter: Callable[[str], None] = lambda kind: None,
) -> StepResult:
    """Run one step over this rank's `micro_batches`.

    Args:
        judge: why a step of this (finite) loss and gradient norm is an outlier; "" if it is none.
        signals: numbers of this rank's that ride along with the sums over ranks.
        reduction: how losses and gradients are added up; None in the order they come.
        before_sums: called when this rank has its gradients, before it waits for the others.
        enter: called with what comes next, a kind of `clock.KINDS`.
    """
    reduction = reduction or Reduction(model)
    num_valid = forward_backward(model, precision, micro_batches, step, reduction, enter)
    before_sums()
    enter("sums")
    gradients, loss = reduction.finish(), reduction.loss
    counts = [precision.nonfinite().to(loss), reduction.outside.to(loss)]
    totals = torch.stack([loss, *counts, *map(loss.new_tensor, signals)])
    all_reduce(totals)
    loss_sum, nonfinite, outside, *summed = totals.tolist()
    norm = reduction.norm(gradients)
    grad_norm = float(norm)
    bad = _bad(loss_sum, grad_norm, int(nonfinite), int(outside))
    skipped = bad or judge(loss_sum, grad_norm)
    enter("optimizer")
    if not skipped:
        clip(gradients, clip_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    enter("other")
    return StepResult(loss_sum, grad_norm, num_valid, int(nonfinite), skipped, tuple(summed))


def clip(gradients: list[Tensor], clip_norm: float, norm: Tensor) -> None:
    """Scale gradients of total L2 `norm` down to `clip_norm`, in place, where they exceed it."""
    torch._foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))


def forward_backward(
    model: HybridModel,
    precision: Precision,
    micro_batches: MicroBatches,
    step: int,
    reduction: Reduction,
    enter: Callable[[str], None] = lambda kind: None,
) -> int:
    """Leave this rank's losses and gradients in `reduction`. Returns the valid tokens of all."""
    num_valid = _count_valid(micro_batches).to(next(model.parameters()).device)
    all_reduce(num_valid)
    reduction.begin()
    precision.statistics.begin(step)  # on a rank without a micro-batch, too
    for position, (index, batch) in enumerate(micro_batches, start=1):
        if index is None:
            precision.begin(step, 0, counts=False)
        else:
            precision.begin(step, index)
        enter("forward")
        loss_sum, _ = model.loss(batch.tokens_BT, batch.labels_BT, batch.seq_idx_BT)
        share = loss_sum / num_valid.clamp(min=1)
        enter("backward")
        reduction.backward(share, last=position == len(micro_batches))
    return int(num_valid)


def _bad(loss: float, grad_norm: float, nonfinite: int, outside: int) -> str:
    """What is not finite or too large to be added up, in words."""
    bad = [
        f"{name} {value}"
        for name, value in (("loss", loss), ("gradient norm", grad_norm))
        if not abs(value) < float("inf")
    ]
    if nonfinite:
        bad.append(f"{nonfinite} non-finite quantizer inputs")
    if outside:
        bad.append(f"{outside} gradients with elements beyond what the reproducible sum holds")
    return ", ".join(bad)


def _count_valid(micro_batches: MicroBatches) -> Tensor:
    counts = [(batch.labels_BT >= 0).sum() for _, batch in micro_batches]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
