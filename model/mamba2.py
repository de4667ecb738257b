"""The Mamba-2 mixer (arXiv 2405.21060), with documents kept apart.

Legend: B batch, T tokens, D hidden size, H heads, P head dim, G groups, N state size,
I = H P inner width, C = I + 2 G N convolution channels, K convolution taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.backends import MambaKernels, mamba_kernels
from model.config import ModelConfig
from model.conv import CausalConv
from model.linear import Linear
from model.norms import GatedRMSNorm
from model.packing import Packing
from model.ssd import best_chunk, chunked_scan, step_scan


@dataclass
class MambaCache:
    """A mixer's memory between generated tokens: the last K - 1 convolution inputs, the state."""

    conv_BKC: Tensor
    state_BHPN: Tensor


class Mamba2(nn.Module):
    """in -> (z, x, B, C, dt) -> convolution -> scan -> gated norm -> out."""

    def __init__(self, config: ModelConfig, recompute_core: bool = False) -> None:
        super().__init__()
        self.config = config
        self.recompute_core = recompute_core
        inner, heads = config.mamba_inner_size, config.mamba_num_heads
        self.in_zxbc = Linear(config.hidden_size, inner + config.mamba_conv_size)
        self.in_dt = Linear(config.hidden_size, heads)
        self.conv = CausalConv(config.mamba_conv_size, config.mamba_conv_kernel)
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(inner, config.mamba_num_groups, config.norm_eps)
        self.out = Linear(inner, config.hidden_size)

    def forward(self, x_BTD: Tensor, packing: Packing, cache: MambaCache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; fills ``cache``, where given, for ``step``."""
        zxbc, dt = self.in_zxbc(x_BTD), self.in_dt(x_BTD)
        if self.recompute_core and torch.is_grad_enabled():
            core = checkpoint(
                self.core, zxbc, dt, packing, use_reentrant=False, preserve_rng_state=False
            )
        else:
            core = self.core(zxbc, dt, packing, cache)
        return self.out(core)

    def core(
        self, zxbc: Tensor, dt: Tensor, packing: Packing, cache: MambaCache | None = None
    ) -> Tensor:
        """What lies between the linears: [B, T, I + C] and [B, T, H] -> [B, T, I]."""
        z, xbc = zxbc.split([self.config.mamba_inner_size, self.config.mamba_conv_size], dim=-1)
        kernels = mamba_kernels(self.config, xbc.device, xbc.dtype)
        x, b, c = self._split_heads(self.conv(xbc, packing, kernels))
        inputs = x, self._time_step(dt), b, c
        y, state = self._scan(*inputs, packing, kernels, cache is not None)
        if cache is not None:
            assert state is not None
            cache.state_BHPN = state
            cache.conv_BKC = self._conv_tail(xbc, packing)
        return self.norm(y.flatten(-2), z)

    def _scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        packing: Packing,
        kernels: MambaKernels | None,
        with_state: bool,
        initial_BHPN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """FP32 outputs (FP64 for FP64), and the final state: where it is asked for, at least."""
        A, D = -torch.exp(self.A_log.to(dt.dtype)), self.D.to(dt.dtype)
        config = self.config
        if kernels is None:
            size = config.mamba_state_size
            chunk = best_chunk(config.mamba_chunk_size, size, x.shape[1], x.device)
            return chunked_scan(x, dt, A, b, c, D, packing.chunks(chunk), initial_BHPN)
        result = kernels.scan(
            x,
            dt,
            A,
            b,
            c,
            config.mamba_chunk_size,
            D=D,
            seq_idx=packing.seq_idx_BT,
            initial_states=initial_BHPN,
            return_final_states=with_state,
        )
        y, state = result if with_state else (result, None)
        return y.float(), state

    def extend(self, x_BTD: Tensor, cache: MambaCache) -> Tensor:
        """T more tokens of every row: [B, T, D] -> [B, T, D]; updates ``cache``."""
        zxbc, dt = self.in_zxbc(x_BTD), self.in_dt(x_BTD)
        z, xbc = zxbc.split([self.config.mamba_inner_size, self.config.mamba_conv_size], dim=-1)
        taps, tokens = cache.conv_BKC.shape[1], xbc.shape[1]
        remembered_BLC = torch.cat([cache.conv_BKC, xbc], dim=1)
        longer, new = (
            Packing(x_BTD.new_zeros(len(x_BTD), length, dtype=torch.int32), xbc.dtype)
            for length in (taps + tokens, tokens)
        )
        kernels = mamba_kernels(self.config, xbc.device, xbc.dtype)
        x, b, c = self._split_heads(self.conv(remembered_BLC, longer, kernels)[:, taps:])
        inputs = x, self._time_step(dt), b, c
        y, state = self._scan(*inputs, new, kernels, True, cache.state_BHPN)
        assert state is not None
        cache.state_BHPN, cache.conv_BKC = state, remembered_BLC[:, tokens:]
        return self.out(self.norm(y.flatten(-2), z))

    def step(self, x_BD: Tensor, cache: MambaCache) -> Tensor:
        """One token: [B, D] -> [B, D]; updates ``cache``."""
        zxbc, dt = self.in_zxbc(x_BD), self.in_dt(x_BD)
        z, xbc = zxbc.split([self.config.mamba_inner_size, self.config.mamba_conv_size], dim=-1)
        xbc, cache.conv_BKC = self.conv.step(xbc, cache.conv_BKC)
        dt = self._time_step(dt)
        x, b, c = (part.to(dt.dtype) for part in self._split_heads(xbc))
        A, D = -torch.exp(self.A_log.to(dt.dtype)), self.D.to(dt.dtype)
        y, cache.state_BHPN = step_scan(x, dt, A, b, c, D, cache.state_BHPN)
        return self.out(self.norm(y.flatten(-2), z))

    def _time_step(self, dt: Tensor) -> Tensor:
        """softplus(dt + dt_bias), clamped at ``dt_floor``: FP32, or FP64 for FP64 inputs."""
        wide = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        return dt.clamp(min=self.config.dt_floor) if self.config.dt_floor else dt

    def _split_heads(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., C] -> x [..., H, P], B and C [..., G, N]."""
        config = self.config
        group_size = config.mamba_num_groups * config.mamba_state_size
        x, b, c = xbc.split([config.mamba_inner_size, group_size, group_size], dim=-1)
        per_group = (config.mamba_num_groups, config.mamba_state_size)
        return x.unflatten(-1, (config.mamba_num_heads, -1)), *(
            part.unflatten(-1, per_group) for part in (b, c)
        )

    def _conv_tail(self, xbc_BTC: Tensor, packing: Packing) -> Tensor:
        """The last K - 1 inputs [B, K - 1, C], zero where they precede the last document."""
        seq, taps = packing.seq_idx_BT, self.config.mamba_conv_kernel - 1
        masked = xbc_BTC * (seq == seq[:, -1:])[..., None]
        return F.pad(masked[:, -taps:], (0, 0, max(0, taps - seq.shape[1]), 0))
