"""The feed-forward block: up, squared ReLU (arXiv 2109.08668), down."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.config import ModelConfig
from model.layers import Linear


def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0)^2``, elementwise."""
    return x.relu().square()


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
