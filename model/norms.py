"""RMSNorm, plain and gated, with hand-written gradients that keep no intermediate.

Legend: M tokens, I width, J width of a group (the norm's extent).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.blocking import blocks


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _inverse_rms(x_MI: Tensor, groups: int, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over each group: [M, groups, 1]."""
    x_MGJ = x_MI.unflatten(-1, (groups, -1))
    norm = torch.linalg.vector_norm(x_MGJ, dim=-1, keepdim=True)
    return norm.square_().div_(x_MGJ.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(
    grad_MI: Tensor, x_MI: Tensor, inverse_MG1: Tensor, weight_I: Tensor, grad_weight_I: Tensor
) -> Tensor:
    """The gradient of x; adds to the weight's. With n = x * inverse, g = grad * weight:
    dx = inverse * (g - n * mean(g n))."""
    groups = inverse_MG1.shape[1]
    normed = x_MI.unflatten(-1, (groups, -1)) * inverse_MG1
    product = grad_MI * normed.flatten(-2)
    grad_weight_I += product.sum(dim=0)
    mean = product.mul_(weight_I).unflatten(-1, (groups, -1)).mean(dim=-1, keepdim=True)
    scaled = (grad_MI * weight_I).unflatten(-1, (groups, -1))
    return scaled.addcmul_(normed, mean, value=-1).mul_(inverse_MG1).flatten(-2)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        x_MI = x.reshape(-1, x.shape[-1])
        weight_I = weight_I.to(_wide(x.dtype))
        out = torch.empty_like(x_MI)
        inverse = x_MI.new_empty(x_MI.shape[0], 1, 1, dtype=weight_I.dtype)
        for part in blocks(x_MI):
            wide = x_MI[part].to(weight_I.dtype)
            inverse[part] = _inverse_rms(wide, 1, eps)
            out[part] = (wide * inverse[part, 0]).mul_(weight_I)
        ctx.save_for_backward(x, weight_I, inverse)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_I, inverse = ctx.saved_tensors
        x_MI, grad_MI = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        grad_x, grad_weight = torch.empty_like(x_MI), torch.zeros_like(weight_I)
        for part in blocks(x_MI):
            wide, wide_grad = x_MI[part].to(weight_I.dtype), grad_MI[part].to(weight_I.dtype)
            grad_x[part] = _norm_backward(wide_grad, wide, inverse[part], weight_I, grad_weight)
        return grad_x.view(x.shape), grad_weight, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, z: Tensor, weight_I: Tensor, groups: int, eps: float
    ) -> Tensor:
        y_MI, z_MI = y.flatten(0, -2), z.flatten(0, -2)
        weight_I = weight_I.to(y.dtype)
        out = torch.empty(z_MI.shape, dtype=z.dtype, device=z.device)
        inverse = y_MI.new_empty(y_MI.shape[0], groups, 1)
        for part in blocks(y_MI):
            gated = F.silu(z_MI[part].to(y.dtype)).mul_(y_MI[part])
            inverse[part] = _inverse_rms(gated, groups, eps)
            gated.unflatten(-1, (groups, -1)).mul_(inverse[part])
            out[part] = gated.mul_(weight_I)
        ctx.save_for_backward(y, z, weight_I, inverse)
        return out.view(z.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        y, z, weight_I, inverse = ctx.saved_tensors
        y_MI, z_MI, grad_MI = (tensor.flatten(0, -2) for tensor in (y, z, grad))
        grad_y, grad_weight = torch.empty_like(y_MI), torch.zeros_like(weight_I)
        grad_z = torch.empty(z_MI.shape, dtype=z.dtype, device=z.device)
        for part in blocks(y_MI):
            gate_in = z_MI[part].to(y.dtype)
            gate = F.silu(gate_in)
            grad_gated = _norm_backward(
                grad_MI[part].to(y.dtype), y_MI[part] * gate, inverse[part], weight_I, grad_weight
            )
            torch.mul(grad_gated, gate, out=grad_y[part])
            grad_z[part] = torch.ops.aten.silu_backward(grad_gated.mul_(y_MI[part]), gate_in)
        return grad_y.view(y.shape), grad_z.view(z.shape), grad_weight, None, None


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, in FP32, cast back to the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., I], same dtype."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """RMSNorm of ``y * silu(z)`` over each group's channels apart, in FP32."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.groups = groups
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y (FP32 or wider), z [..., I] -> [..., I] in z's dtype."""
        return _GatedRMSNorm.apply(y, z, self.weight, self.groups, self.eps)
