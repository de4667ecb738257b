"""Cross-entropy over a large vocabulary, never holding more than a slice of the logits.

Legend: M tokens (a batch's, flattened), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100
SLICE_ELEMENTS = 1 << 25
"""Logits held at once: 128 MiB in FP32."""


class _SumCrossEntropy(torch.autograd.Function):
    """Sum of ``-log softmax(logits)[label]`` in FP32; keeps the logits' gradient, not the logits.

    The gradient of the sum is known in the forward pass, and takes the log-probabilities' place.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        wide = torch.promote_types(logits_MV.dtype, torch.float32)
        log_probs = torch.log_softmax(logits_MV, dim=-1, dtype=wide)
        valid_M = labels_M != IGNORED
        index_M1 = labels_M.where(valid_M, 0)[:, None]
        picked_M = log_probs.gather(1, index_M1).squeeze(1)
        loss = -picked_M.where(valid_M, 0).sum()
        if ctx.needs_input_grad[0]:
            grad = log_probs.exp_()
            grad.scatter_add_(1, index_M1, grad.new_full((1, 1), -1.0).expand_as(index_M1))
            grad.masked_fill_(~valid_M[:, None], 0)
            ctx.save_for_backward(grad)
            ctx.logits_dtype = logits_MV.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (grad_MV,) = ctx.saved_tensors
        return grad_MV.mul_(grad_loss).to(ctx.logits_dtype), None


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


def token_cross_entropy(
    head: Callable[[Tensor], Tensor], x_MD: Tensor, labels_M: Tensor, vocab_size: int
) -> Tensor:
    """Each token's loss [M] in FP32, 0 where the label is ignored. No gradient."""
    step = max(1, SLICE_ELEMENTS // vocab_size)
    losses = [
        torch.nn.functional.cross_entropy(
            head(x).float(), labels, ignore_index=IGNORED, reduction="none"
        )
        for x, labels in zip(x_MD.split(step), labels_M.split(step), strict=True)
    ]
    return torch.cat(losses)
