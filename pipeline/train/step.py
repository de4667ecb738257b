"""One optimizer step: forward and backward of every micro-batch, then a decision made once.

The loss is the sum over valid tokens divided by their count in the whole global batch, over all
micro-batches and ranks; so gradients do not depend on how a batch is cut. Whether the step is
taken is decided from reduced numbers, the same on every rank, before the optimizer runs: a
non-finite loss, gradient norm or quantizer input skips it everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from model import HybridModel
from pipeline.data.stream import Batch
from quant import Precision


@dataclass(frozen=True)
class StepResult:
    """What a step found. `taken` is False where it was skipped on every rank."""

    loss: float  # nats a token, mean over the global batch
    grad_norm: float  # L2, before clipping
    num_valid: int  # tokens that count
    nonfinite: int  # non-finite elements that quantizers were given
    taken: bool


def train_step(
    model: HybridModel,
    precision: Precision,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[int, Batch]],
    *,
    step: int,
    learning_rate: float,
    clip_norm: float,
) -> StepResult:
    """Run one step over this rank's `micro_batches`, each with its index in the global batch."""
    num_valid = _count_valid(micro_batches).to(next(model.parameters()).device)
    _all_reduce(num_valid)
    loss = torch.zeros((), dtype=torch.float64, device=num_valid.device)
    for index, batch in micro_batches:
        precision.begin(step, index)
        loss_sum, _ = model.loss(batch.tokens_BT, batch.labels_BT, batch.seq_idx_BT)
        scaled = loss_sum / num_valid.clamp(min=1)
        scaled.backward()
        loss += scaled.detach()
    gradients = _gradients(model)
    _reduce_gradients(gradients)
    totals = torch.stack([loss, precision.nonfinite().to(loss)])
    _all_reduce(totals)
    grad_norm = torch.nn.utils.get_total_norm(gradients)
    nonfinite = int(totals[1])
    taken = bool(torch.isfinite(totals[0]) and torch.isfinite(grad_norm)) and nonfinite == 0
    if taken:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(float(totals[0]), float(grad_norm), int(num_valid), nonfinite, taken)


def _count_valid(micro_batches: Sequence[tuple[int, Batch]]) -> Tensor:
    counts = [(batch.labels_BT >= 0).sum() for _, batch in micro_batches]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)


def _gradients(model: HybridModel) -> list[Tensor]:
    """Every parameter's FP32 gradient; zeros on a rank that had no micro-batch."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _all_reduce(tensor: Tensor) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def _reduce_gradients(gradients: list[Tensor]) -> None:
    """Sum FP32 gradients over ranks, as one flat buffer."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
