"""Cross-entropy over a large vocabulary, never holding more than a slice of the logits.

Legend: M tokens (a batch's, flattened), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from model.blocking import blocks

IGNORED = -100
SLICE_ELEMENTS = 1 << 25
"""Logits held at once: 128 MiB in FP32."""


def _exponentiate(logits_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the logits by exp(logits - max), in place; returns each row's max and sum [M, 1]."""
    max_M1 = logits_MV.new_empty(logits_MV.shape[0], 1)
    sum_M1 = torch.empty_like(max_M1)
    for part in blocks(logits_MV):
        torch.amax(logits_MV[part], dim=1, keepdim=True, out=max_M1[part])
        exp = logits_MV[part].sub_(max_M1[part]).exp_()
        torch.sum(exp, dim=1, keepdim=True, out=sum_M1[part])
    return max_M1, sum_M1


class _SumCrossEntropy(torch.autograd.Function):
    """Sum of ``-log softmax(logits)[label]`` in FP32 (FP64 for FP64 logits).

    Works in the memory of the logits, which nothing else reads: the forward pass leaves
    exp(logits - max) there, the backward pass scales it to the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        wide = logits_MV.detach().to(torch.promote_types(logits_MV.dtype, torch.float32))
        valid_M = labels_M != IGNORED
        index_M1 = labels_M.clamp_min(0)[:, None]
        picked_M1 = wide.gather(1, index_M1)
        max_M1, sum_M1 = _exponentiate(wide)
        ctx.save_for_backward(wide, sum_M1, index_M1, valid_M)
        ctx.logits_dtype = logits_MV.dtype
        return (sum_M1.log() + max_M1 - picked_M1).squeeze(1).where(valid_M, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        exp_MV, sum_M1, index_M1, valid_M = ctx.saved_tensors
        scale_M1 = (grad_loss * valid_M[:, None]).to(exp_MV.dtype)
        grad_MV = exp_MV.mul_(scale_M1 / sum_M1).scatter_add_(1, index_M1, -scale_M1)
        return grad_MV.to(ctx.logits_dtype), None


def chunked_cross_entropy(
    head: Callable[[Tensor], Tensor], x_MD: Tensor, labels_M: Tensor, vocab_size: int
) -> Tensor:
    """The summed loss, a scalar in FP32 (FP64 for FP64 inputs).

    ``head`` maps [m, D] to logits [m, V] and is called on slices of tokens. Where one slice holds
    all tokens its gradient is kept; with more, each slice's logits are recomputed in the backward
    pass, so that one slice exists at a time.
    """
    step = max(1, SLICE_ELEMENTS // vocab_size)
    if x_MD.shape[0] <= step:
        return _SumCrossEntropy.apply(head(x_MD), labels_M)

    def slice_loss(x: Tensor, labels: Tensor) -> Tensor:
        return _SumCrossEntropy.apply(head(x), labels)

    losses = [
        checkpoint(slice_loss, x, labels, use_reentrant=False, preserve_rng_state=False)
        for x, labels in zip(x_MD.split(step), labels_M.split(step), strict=True)
    ]
    return torch.stack(losses).sum()


@torch.no_grad()
def token_cross_entropy(
    head: Callable[[Tensor], Tensor], x_MD: Tensor, labels_M: Tensor, vocab_size: int
) -> Tensor:
    """Each token's loss [M] in FP32, 0 where the label is ignored. No gradient."""
    step = max(1, SLICE_ELEMENTS // vocab_size)
    losses = []
    for x, labels in zip(x_MD.split(step), labels_M.split(step), strict=True):
        logits = head(x).float()
        picked = logits.gather(1, labels.clamp_min(0)[:, None])
        max_M1, sum_M1 = _exponentiate(logits)
        losses.append((sum_M1.log() + max_M1 - picked).squeeze(1))
    return torch.cat(losses).where(labels_M != IGNORED, 0)
