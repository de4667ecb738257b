"""Mamba-2's scan as matrix products over chunks (state-space duality, arXiv 2405.21060).

Per head, with state S [P, N]:  S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t.
Within a chunk of Q tokens the outputs are a decayed, causal attention: with l the running sum of
dt A,

    y_t = sum over s <= t of  (C_t . B_s) exp(l_t - l_s) dt_s x_s  +  exp(l_t) C_t . (entering state).

Across chunks only states travel, combined by one more decay matrix, over chunk boundaries. Running
sums restart at each document, so that not even a rounding error crosses a boundary.

The gradient of l needs no matrix of its own: every term of y_t carries exp(l_t), and every use of
u_s = dt_s x_s carries exp(-l_s), hence  dl_t = <dy_t, y_t - D x_t> - <du_t, u_t>.

Legend: B batch, T tokens, C chunks, Q tokens in a chunk, H heads, G groups of heads (each with one
B and C), R heads in a group, P head dim, N state size, J = R P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.blocking import blocks
from model.packing import Chunks


def chunked_scan(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    D_H: Tensor,
    chunks: Chunks,
    initial_state_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan's outputs [B, T, H, P] and final states [B, H, P, N] (of each row's last document).

    All inputs share one dtype, FP32 or FP64. ``initial_state`` belongs to the row's first document.
    """
    if initial_state_BHPN is None:
        shape = (x_BTHP.shape[0], *x_BTHP.shape[2:], B_BTGN.shape[-1])
        initial_state_BHPN = x_BTHP.new_zeros(shape)
    inputs = [_pad_to_chunks(value, chunks) for value in (x_BTHP, dt_BTH, B_BTGN, C_BTGN)]
    y, final = _ChunkedScan.apply(*inputs, A_H, D_H, initial_state_BHPN, chunks)
    return y[:, : x_BTHP.shape[1]], final


def _pad_to_chunks(value_BT: Tensor, chunks: Chunks) -> Tensor:
    """Zeros at the end: with dt = 0 they change no state."""
    if chunks.padding == 0:
        return value_BT
    return F.pad(value_BT, (0, 0) * (value_BT.dim() - 2) + (0, chunks.padding))


@dataclass
class _Pieces:
    """What forward and backward both compute, of a few rows (see the module's docstring)."""

    u_BCHQP: Tensor
    """dt x."""
    B_BCGQN: Tensor
    C_BCGQN: Tensor
    decay_BCHQQ: Tensor
    """exp(l_t - l_s), 0 where s > t or the documents differ."""
    mixing_BCHQQ: Tensor
    """decay (C_t . B_s)."""
    into_BCQH: Tensor
    """exp(l_t), 0 where the entering state is another document's."""
    out_of_BCQH: Tensor
    """Decay from each token to the chunk's end."""
    passing_BHCC: Tensor
    """Decay from boundary to boundary, [B, H, C+1, C+1]."""


def _pieces(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    A_H: Tensor,
    chunks: Chunks,
    decay: Tensor,
    decay_is_known: bool = False,
) -> _Pieces:
    """``decay`` is a buffer [B, C, H, Q, Q]: filled here, unless it is known."""
    groups, Q = B_BTGN.shape[2], chunks.size
    x_BCHQP = x_BTHP.unflatten(1, (-1, Q)).transpose(2, 3)
    dt_BCQH = dt_BTH.unflatten(1, (-1, Q))
    u_BCHQP = torch.empty(x_BCHQP.shape, dtype=x_BTHP.dtype, device=x_BTHP.device)
    torch.mul(x_BCHQP, dt_BCQH.transpose(2, 3)[..., None], out=u_BCHQP)
    B_BCGQN, C_BCGQN = (
        value.unflatten(1, (-1, Q)).transpose(2, 3).contiguous() for value in (B_BTGN, C_BTGN)
    )
    log_BCQH = chunks.same @ (dt_BCQH * A_H)
    log_BCHQ = log_BCQH.transpose(2, 3).contiguous()
    if not decay_is_known:
        torch.sub(log_BCHQ[..., :, None], log_BCHQ[..., None, :], out=decay)
        decay.add_(chunks.same_log[:, :, None]).exp_()
    scores_BCGQQ = C_BCGQN @ B_BCGQN.transpose(-1, -2)
    mixing = decay.unflatten(2, (groups, -1)) * scores_BCGQQ[:, :, :, None]
    into_BCQH = log_BCQH.exp() * chunks.enters[..., None]
    total_BCH = F.pad(log_BCHQ[..., -1], (0, 0, 1, 0))
    boundary_BHC = (chunks.between @ total_BCH).transpose(1, 2)
    passing = boundary_BHC[..., :, None] - boundary_BHC[..., None, :]
    passing = passing.add_(chunks.between_log[:, None]).exp_()
    return _Pieces(
        u_BCHQP=u_BCHQP,
        B_BCGQN=B_BCGQN,
        C_BCGQN=C_BCGQN,
        decay_BCHQQ=decay,
        mixing_BCHQQ=mixing.flatten(2, 3),
        into_BCQH=into_BCQH,
        out_of_BCQH=decay[..., -1, :].transpose(2, 3),
        passing_BHCC=passing,
    )


def _by_group(value_BCHQP: Tensor, scale_BCQH: Tensor, groups: int) -> Tensor:
    """``value * scale`` with a group's heads side by side, [B, C, G, Q, J]: one product a group."""
    batch, num_chunks, heads, Q, head_dim = value_BCHQP.shape
    out = value_BCHQP.new_empty(batch, num_chunks, groups, Q, heads // groups, head_dim)
    value = value_BCHQP.unflatten(2, (groups, -1)).transpose(3, 4)
    scale = scale_BCQH.unflatten(3, (groups, -1)).transpose(2, 3)
    torch.mul(value, scale[..., None], out=out)
    return out.flatten(-2)


def _heads(value_BCGQJ: Tensor, heads: int) -> Tensor:
    """[B, C, G, Q, J] -> [B, C, Q, H, P], a view."""
    groups = value_BCGQJ.shape[2]
    return value_BCGQJ.unflatten(-1, (heads // groups, -1)).transpose(2, 3).flatten(3, 4)


def _forward_rows(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    initial: Tensor,
    chunks: Chunks,
    y: Tensor,
    states: Tensor,
    decay: Tensor,
) -> None:
    """Fill y [B, T, H, P], the states at all boundaries [B, H, C+1, P, N], and the decays."""
    heads, groups, Q = x.shape[2], B.shape[2], chunks.size
    p = _pieces(x, dt, B, C, A, chunks, decay)
    leaving_BCGQJ = _by_group(p.u_BCHQP, p.out_of_BCQH, groups)
    added_BCHPN = (leaving_BCGQJ.transpose(-1, -2) @ p.B_BCGQN).view(
        *p.u_BCHQP.shape[:3], *states.shape[-2:]
    )
    added_BHCPN = torch.cat([initial[:, None], added_BCHPN], dim=1).transpose(1, 2)
    states.copy_((p.passing_BHCC @ added_BHCPN.flatten(3)).view(states.shape))
    entering_BCGJN = (
        states[:, :, :-1].transpose(1, 2).reshape(*p.B_BCGQN.shape[:3], -1, states.shape[-1])
    )
    carried_BCGQJ = p.C_BCGQN @ entering_BCGJN.transpose(-1, -2)
    y_BCQHP = y.unflatten(1, (-1, Q))
    local_BCQHP = (p.mixing_BCHQQ @ p.u_BCHQP).transpose(2, 3)
    torch.addcmul(local_BCQHP, _heads(carried_BCGQJ, heads), p.into_BCQH[..., None], out=y_BCQHP)
    y.addcmul_(x, D[:, None])


class _ChunkedScan(torch.autograd.Function):
    """Keeps its inputs, outputs, decays and boundary states; computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        A: Tensor,
        D: Tensor,
        initial: Tensor,
        chunks: Chunks,
    ) -> tuple[Tensor, Tensor]:
        batch, _, heads, head_dim = x.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_chunks = chunks.enters.shape[1]
        states = x.new_empty(batch, heads, num_chunks + 1, head_dim, B.shape[-1])
        decay = x.new_empty(batch, num_chunks, heads, chunks.size, chunks.size)
        for rows in blocks(batch, x[0].numel(), x.device):
            _forward_rows(
                *(value[rows] for value in (x, dt, B, C)),
                A,
                D,
                initial[rows],
                chunks.rows(rows),
                y[rows],
                states[rows],
                decay[rows],
            )
        ctx.save_for_backward(x, dt, B, C, A, D, y, states, decay)
        ctx.chunks = chunks
        return y, states[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, B, C, A, D, y, states, decay = ctx.saved_tensors
        grads = [
            torch.empty(value.shape, dtype=x.dtype, device=x.device) for value in (x, dt, B, C)
        ]
        grad_A, grad_D = torch.zeros_like(A), torch.zeros_like(D)
        grad_initial = torch.empty_like(grad_final)
        for rows in blocks(x.shape[0], x[0].numel(), x.device):
            _backward_rows(
                *(value[rows] for value in (x, dt, B, C)),
                A,
                D,
                ctx.chunks.rows(rows),
                y[rows],
                states[rows],
                decay[rows],
                grad_y[rows],
                grad_final[rows],
                [grad[rows] for grad in grads],
                grad_A,
                grad_D,
                grad_initial[rows],
            )
        return *grads, grad_A, grad_D, grad_initial, None


def _backward_rows(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    chunks: Chunks,
    y: Tensor,
    states: Tensor,
    decay: Tensor,
    grad_y: Tensor,
    grad_final: Tensor,
    grads: list[Tensor],
    grad_A: Tensor,
    grad_D: Tensor,
    grad_initial: Tensor,
) -> None:
    """Fill the gradients of x, dt, B, C and the initial state; add to those of A and D."""
    heads, groups, Q = x.shape[2], B.shape[2], chunks.size
    grad_x, grad_dt, grad_B, grad_C = grads
    p = _pieces(x, dt, B, C, A, chunks, decay, decay_is_known=True)
    grad_y_BCHQP = grad_y.unflatten(1, (-1, Q)).transpose(2, 3).contiguous()

    # y = mixing u: the scores' gradient, summed over a group's heads, and part of u's.
    grad_scores = (grad_y_BCHQP @ p.u_BCHQP.transpose(-1, -2)).mul_(p.decay_BCHQQ)
    grad_scores_BCGQQ = grad_scores.unflatten(2, (groups, -1)).sum(dim=3)
    grad_u_BCHQP = p.mixing_BCHQQ.transpose(-1, -2) @ grad_y_BCHQP

    # y += into C . entering, then the states, from the last boundary back.
    entering_BCGJN = (
        states[:, :, :-1].transpose(1, 2).reshape(*p.B_BCGQN.shape[:3], -1, B.shape[-1])
    )
    grad_carried_BCGQJ = _by_group(grad_y_BCHQP, p.into_BCQH, groups)
    grad_C_BCGQN = grad_scores_BCGQQ @ p.B_BCGQN + grad_carried_BCGQJ @ entering_BCGJN
    grad_entering = (grad_carried_BCGQJ.transpose(-1, -2) @ p.C_BCGQN).view(
        *p.u_BCHQP.shape[:3], *states.shape[-2:]
    )
    grad_states_BHCPN = torch.cat([grad_entering, grad_final[:, None]], dim=1).transpose(1, 2)
    grad_added_BHCK = p.passing_BHCC.transpose(-1, -2) @ grad_states_BHCPN.flatten(3)
    grad_initial.copy_(grad_added_BHCK[:, :, 0].view(grad_initial.shape))
    grad_added_BCGJN = grad_added_BHCK[:, :, 1:].transpose(1, 2).reshape(entering_BCGJN.shape)

    # What each chunk adds to the state: u's other part, and B's.
    grad_leaving_BCGQJ = p.B_BCGQN @ grad_added_BCGJN.transpose(-1, -2)
    grad_u_BCQHP = grad_u_BCHQP.transpose(2, 3)
    grad_u_BCQHP.addcmul_(_heads(grad_leaving_BCGQJ, heads), p.out_of_BCQH[..., None])
    leaving_BCGQJ = _by_group(p.u_BCHQP, p.out_of_BCQH, groups)
    grad_B_BCGQN = (
        grad_scores_BCGQQ.transpose(-1, -2) @ p.C_BCGQN + leaving_BCGQJ @ grad_added_BCGJN
    )
    grad_B.unflatten(1, (-1, Q)).copy_(grad_B_BCGQN.transpose(2, 3))
    grad_C.unflatten(1, (-1, Q)).copy_(grad_C_BCGQN.transpose(2, 3))

    x_BCQHP, grad_y_BCQHP = x.unflatten(1, (-1, Q)), grad_y.unflatten(1, (-1, Q))
    skip_BTH = (grad_y * x).sum(dim=-1)
    grad_D += skip_BTH.sum(dim=(0, 1))
    use_BTH = (grad_u_BCQHP * x_BCQHP).sum(dim=-1).flatten(1, 2)
    grad_log_BTH = (grad_y * y).sum(dim=-1) - skip_BTH * D - use_BTH * dt
    ending_BH = (grad_final * states[:, :, -1]).sum(dim=(-1, -2))
    grad_step_BTH = _reversed_running_sum(grad_log_BTH, ending_BH, chunks)
    grad_A += (grad_step_BTH * dt).sum(dim=(0, 1))
    torch.addcmul(use_BTH, grad_step_BTH, A, out=grad_dt)
    dt_BCQH = dt.unflatten(1, (-1, Q))
    grad_x_BCQHP = grad_x.unflatten(1, (-1, Q))
    torch.mul(grad_u_BCQHP, dt_BCQH[..., None], out=grad_x_BCQHP)
    grad_x_BCQHP.addcmul_(grad_y_BCQHP, D[:, None])


def _reversed_running_sum(value_BTH: Tensor, ending_BH: Tensor, chunks: Chunks) -> Tensor:
    """At each token the sum of ``value`` from there to its document's end, plus, in the row's last
    document, ``ending``: the transpose of the running sum that gave l."""
    value_BCQH = value_BTH.unflatten(1, (-1, chunks.size))
    entered_BCH = (value_BCQH * chunks.enters[..., None]).sum(dim=2)
    from_boundary = torch.cat([entered_BCH, ending_BH[:, None]], dim=1)
    later_BCH = (chunks.between.transpose(-1, -2) @ from_boundary)[:, 1:]
    leaves_BCQ = chunks.same[..., -1, :]
    local = chunks.same.transpose(-1, -2) @ value_BCQH
    return local.addcmul_(leaves_BCQ[..., None], later_BCH[:, :, None]).flatten(1, 2)


def step_scan(
    x_BHP: Tensor,
    dt_BH: Tensor,
    A_H: Tensor,
    B_BGN: Tensor,
    C_BGN: Tensor,
    D_H: Tensor,
    state_BHPN: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: outputs [B, H, P] and the new state [B, H, P, N]."""
    per_group = x_BHP.shape[1] // B_BGN.shape[1]
    B_BHN = B_BGN.repeat_interleave(per_group, dim=1)
    C_BHN = C_BGN.repeat_interleave(per_group, dim=1)
    decay_BH = torch.exp(dt_BH * A_H)
    added = (dt_BH[..., None] * x_BHP)[..., None] * B_BHN[:, :, None, :]
    state_BHPN = state_BHPN * decay_BH[..., None, None] + added
    y_BHP = (state_BHPN @ C_BHN[..., None]).squeeze(-1) + D_H[:, None] * x_BHP
    return y_BHP, state_BHPN
