"""The feed-forward block: up, squared ReLU (arXiv 2109.08668), down.

Legend: M tokens, F feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from model.blocking import blocks
from model.config import ModelConfig
from model.linear import Linear


class _SquaredReLU(torch.autograd.Function):
    """``max(x, 0)^2``; the gradient is ``2 max(x, 0)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        x_MF = x.flatten(0, -2)
        out_MF = torch.empty_like(x_MF)
        for part in blocks(x_MF):
            torch.clamp_min(x_MF[part], 0, out=out_MF[part]).square_()
        return out_MF.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x_MF, grad_MF = x.flatten(0, -2), grad.flatten(0, -2)
        out_MF = torch.empty_like(x_MF)
        for part in blocks(x_MF):
            torch.clamp_min(x_MF[part], 0, out=out_MF[part]).mul_(2).mul_(grad_MF[part])
        return out_MF.view(x.shape)


class FeedForward(nn.Module):
    """up -> squared ReLU -> down."""

    def __init__(self, config: ModelConfig, recompute_core: bool = False) -> None:
        super().__init__()
        self.recompute_core = recompute_core
        self.up = Linear(config.hidden_size, config.ffn_hidden_size)
        self.down = Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        up = self.up(x)
        if self.recompute_core and torch.is_grad_enabled():
            return self.down(
                checkpoint(squared_relu, up, use_reentrant=False, preserve_rng_state=False)
            )
        return self.down(squared_relu(up))


def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0)^2``, elementwise, [..., F] -> [..., F]."""
    return _SquaredReLU.apply(x)
