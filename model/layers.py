"""The leaves that every block shares: a linear with FP32 weights, and RMSNorm.

Legend: B batch, T tokens, D width of the last dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """``y = x W^T`` with no bias: FP32 weights, multiplied in the input's dtype.

    Every matrix product with a weight goes through an instance of this class, called as a
    module, so that a precision policy can swap leaves by name.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], same dtype."""
        return F.linear(x, self.weight.to(x.dtype))

    def reset_parameters(self) -> None:
        """Nothing: ``model.init.init_weights`` sets every initial value."""


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, in FP32, cast back to the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)
