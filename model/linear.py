"""The linear that every block uses: FP32 weights, products in the activations' dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
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
