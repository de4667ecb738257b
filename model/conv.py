"""Depthwise causal convolution and SiLU, within documents, with a hand-written gradient.

Legend: B batch, T tokens, C channels, K taps; lag l looks l tokens back with tap K - 1 - l.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.backends import MambaKernels
from model.blocking import blocks
from model.compiling import outside_graphs
from model.packing import Packing


class _ConvSilu(torch.autograd.Function):
    """silu(bias + sum over lags of weight * x one lag back), as shifted multiply-adds."""

    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_CK: Tensor, bias_C: Tensor, packing: Packing
    ) -> Tensor:
        dtype = torch.promote_types(x_BTC.dtype, torch.float32)
        weight_KC = weight_CK.t().to(dtype).contiguous()
        sum_BTC = torch.empty(x_BTC.shape, dtype=dtype, device=x_BTC.device)
        out_BTC = torch.empty_like(sum_BTC)
        for rows in blocks(x_BTC):
            x, total = x_BTC[rows].to(dtype), sum_BTC[rows]
            torch.addcmul(bias_C.to(dtype), x, weight_KC[-1], out=total)
            for lag in range(1, min(len(weight_KC), x.shape[1])):
                earlier = _within_document(x[:, :-lag], packing, lag, rows)
                total[:, lag:].addcmul_(earlier, weight_KC[-1 - lag])
            out_BTC[rows] = F.silu(total)
        ctx.save_for_backward(x_BTC, weight_KC, sum_BTC)
        ctx.packing = packing
        return out_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_BTC, weight_KC, sum_BTC = ctx.saved_tensors
        grad_x = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
        grad_weight_KC = torch.zeros_like(weight_KC)
        grad_bias_C = torch.zeros_like(weight_KC[0])
        for rows in blocks(x_BTC):
            x = x_BTC[rows].to(weight_KC.dtype)
            grad = torch.ops.aten.silu_backward(grad_BTC[rows], sum_BTC[rows])
            grad_bias_C += grad.sum(dim=(0, 1))
            grad_weight_KC[-1] += (grad * x).sum(dim=(0, 1))
            grad_rows = grad * weight_KC[-1]
            for lag in range(1, min(len(weight_KC), x.shape[1])):
                later = _within_document(grad[:, lag:], ctx.packing, lag, rows)
                grad_rows[:, :-lag].addcmul_(later, weight_KC[-1 - lag])
                grad_weight_KC[-1 - lag] += (later * x[:, :-lag]).sum(dim=(0, 1))
            grad_x[rows] = grad_rows
        return grad_x, grad_weight_KC.t(), grad_bias_C, None


def _within_document(pairs: Tensor, packing: Packing, lag: int, rows: slice) -> Tensor:
    """``pairs`` [b, T - lag, C], zero where the two tokens ``lag`` apart are of two documents."""
    mask = packing.conv_mask(lag)
    return pairs if mask is None else pairs * mask[rows]


@outside_graphs
def _conv_silu(x_BTC: Tensor, weight_CK: Tensor, bias_C: Tensor, packing: Packing) -> Tensor:
    return _ConvSilu.apply(x_BTC, weight_CK, bias_C, packing)


class CausalConv(nn.Module):
    """Depthwise causal convolution with bias, then SiLU; never across documents."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(channels, dtype=torch.float32))

    def forward(
        self, x_BTC: Tensor, packing: Packing, kernels: MambaKernels | None = None
    ) -> Tensor:
        """[B, T, C] -> [B, T, C]: FP32 (FP64 for FP64), or the input's dtype from a kernel."""
        if kernels is None:
            return _conv_silu(x_BTC, self.weight, self.bias, packing)
        return kernels.conv(
            x_BTC.transpose(1, 2),
            self.weight,
            self.bias,
            seq_idx=packing.seq_idx_BT,
            activation="silu",
        ).transpose(1, 2)

    def step(self, x_BC: Tensor, cache_BKC: Tensor) -> tuple[Tensor, Tensor]:
        """One token: outputs [B, C] and the inputs to remember [B, K - 1, C]."""
        window_BKC = torch.cat([cache_BKC, x_BC[:, None]], dim=1)
        dtype = torch.promote_types(x_BC.dtype, torch.float32)
        weight_KC, bias = self.weight.t().to(dtype), self.bias.to(dtype)
        return F.silu((window_BKC * weight_KC).sum(dim=1) + bias), window_BKC[:, 1:]
