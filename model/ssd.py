"""Mamba-2's scan as matrix products over chunks (state-space duality, arXiv 2405.21060).

Per head, with state S [P, N]:

    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t.

Within a chunk of Q tokens the outputs are a decayed, causal attention. With l the running sum of
dt A:

    y_t = sum over s <= t of (C_t . B_s) exp(l_t - l_s) dt_s x_s  +  exp(l_t) C_t . entering state.

Across chunks only states travel, combined by one more decay matrix, over chunk boundaries. Running
sums restart at each document, so that not even a rounding error crosses a boundary.

The gradient of l needs no matrix of its own: every term of y_t carries exp(l_t), and every use of
u_s = dt_s x_s carries exp(-l_s), hence  dl_t = <dy_t, y_t - D x_t> - <du_t, u_t>.

Legend: B batch, T tokens, C chunks, Q tokens in a chunk, H heads, G groups of heads (each with one
B and C), R heads in a group, P head dim, N state size, J = R P.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.blocking import blocks
from model.compiling import outside_graphs
from model.packing import Chunks


@outside_graphs
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
    padded = (_pad_to_chunks(value, chunks) for value in (x_BTHP, dt_BTH, B_BTGN, C_BTGN))
    y, final = _ChunkedScan.apply(chunks, initial_state_BHPN, *padded, A_H, D_H)
    return y[:, : x_BTHP.shape[1]], final


def best_chunk(chunk_size: int, state_size: int, tokens: int, device: torch.device) -> int:
    """The chunk to cut rows into: the configured one, at most a row. On a CPU, where products are
    no cheaper than their operands, about the state size (measured: 32 and 64 serve 32 and 128)."""
    if device.type == "cpu":
        chunk_size = min(chunk_size, max(32, min(64, state_size)))
    return min(chunk_size, tokens)


def _pad_to_chunks(value_BT: Tensor, chunks: Chunks) -> Tensor:
    """Zeros at the end: with dt = 0 they change no state."""
    if chunks.padding == 0:
        return value_BT
    return F.pad(value_BT, (0, 0) * (value_BT.dim() - 2) + (0, chunks.padding))


class _Inputs(NamedTuple):
    """The scan's inputs; also, in the same places, their gradients."""

    x_BTHP: Tensor
    dt_BTH: Tensor
    B_BTGN: Tensor
    C_BTGN: Tensor
    A_H: Tensor
    D_H: Tensor

    def rows(self, rows: slice) -> _Inputs:
        x, dt, B, C = (value[rows] for value in self[:4])
        return _Inputs(x, dt, B, C, self.A_H, self.D_H)


class _Kept(NamedTuple):
    """What the forward pass computes and the backward pass reads again."""

    y_BTHP: Tensor
    states_BHCPN: Tensor
    """The states at all boundaries, C + 1 of them: the row's start, then each chunk's end."""
    decay_BCHQQ: Tensor
    """exp(l_t - l_s), 0 where s > t or the documents differ."""

    def rows(self, rows: slice) -> _Kept:
        return _Kept(*(value[rows] for value in self))


class _Pieces(NamedTuple):
    """What both passes compute; see the module's docstring."""

    u_BCHQP: Tensor
    """dt x."""
    B_BCGQN: Tensor
    C_BCGQN: Tensor
    mixing_BCHQQ: Tensor
    """decay (C_t . B_s)."""
    into_BCQH: Tensor
    """exp(l_t), 0 where the entering state is another document's."""
    out_of_BCQH: Tensor
    """Decay from each token to the chunk's end."""
    passing_BHCC: Tensor
    """Decay from boundary to boundary, [B, H, C+1, C+1]."""


def _pieces(inputs: _Inputs, decay_BCHQQ: Tensor, decay_is_known: bool, chunks: Chunks) -> _Pieces:
    """``decay`` is filled here, unless it is known."""
    groups, Q = inputs.B_BTGN.shape[2], chunks.size
    x_BCHQP = inputs.x_BTHP.unflatten(1, (-1, Q)).transpose(2, 3)
    dt_BCQH = inputs.dt_BTH.unflatten(1, (-1, Q))
    u_BCHQP = torch.empty(x_BCHQP.shape, dtype=x_BCHQP.dtype, device=x_BCHQP.device)
    torch.mul(x_BCHQP, dt_BCQH.transpose(2, 3)[..., None], out=u_BCHQP)
    B_BCGQN, C_BCGQN = (
        value.unflatten(1, (-1, Q)).transpose(2, 3).contiguous()
        for value in (inputs.B_BTGN, inputs.C_BTGN)
    )
    log_BCQH = chunks.same @ (dt_BCQH * inputs.A_H)
    log_BCHQ = log_BCQH.transpose(2, 3).contiguous()
    if not decay_is_known:
        torch.sub(log_BCHQ[..., :, None], log_BCHQ[..., None, :], out=decay_BCHQQ)
        decay_BCHQQ.add_(chunks.same_log[:, :, None]).exp_()
    scores_BCGQQ = C_BCGQN @ B_BCGQN.transpose(-1, -2)
    mixing = decay_BCHQQ.unflatten(2, (groups, -1)) * scores_BCGQQ[:, :, :, None]
    total_BCH = F.pad(log_BCHQ[..., -1], (0, 0, 1, 0))
    boundary_BHC = (chunks.between @ total_BCH).transpose(1, 2)
    passing_BHCC = boundary_BHC[..., :, None] - boundary_BHC[..., None, :]
    return _Pieces(
        u_BCHQP=u_BCHQP,
        B_BCGQN=B_BCGQN,
        C_BCGQN=C_BCGQN,
        mixing_BCHQQ=mixing.flatten(2, 3),
        into_BCQH=log_BCQH.exp() * chunks.enters[..., None],
        out_of_BCQH=decay_BCHQQ[..., -1, :].transpose(2, 3),
        passing_BHCC=passing_BHCC.add_(chunks.between_log[:, None]).exp_(),
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


def _entering(states_BHCPN: Tensor, groups: int) -> Tensor:
    """The state at each chunk's start, a group's heads side by side: [B, C, G, J, N]."""
    entering_BCHPN = states_BHCPN[:, :, :-1].transpose(1, 2)
    return entering_BCHPN.unflatten(2, (groups, -1)).flatten(3, 4)


def _forward_rows(inputs: _Inputs, initial_BHPN: Tensor, kept: _Kept, chunks: Chunks) -> None:
    """Fill ``kept``."""
    heads, groups = inputs.x_BTHP.shape[2], inputs.B_BTGN.shape[2]
    p = _pieces(inputs, kept.decay_BCHQQ, False, chunks)

    leaving_BCGQJ = _by_group(p.u_BCHQP, p.out_of_BCQH, groups)
    added_BCGJN = leaving_BCGQJ.transpose(-1, -2) @ p.B_BCGQN
    added_BCHPN = added_BCGJN.unflatten(3, (heads // groups, -1)).flatten(2, 3)
    added_BHCPN = torch.cat([initial_BHPN[:, None], added_BCHPN], dim=1).transpose(1, 2)
    states_BHCK = p.passing_BHCC @ added_BHCPN.flatten(3)
    kept.states_BHCPN.copy_(states_BHCK.view(kept.states_BHCPN.shape))

    carried_BCGQJ = p.C_BCGQN @ _entering(kept.states_BHCPN, groups).transpose(-1, -2)
    local_BCQHP = (p.mixing_BCHQQ @ p.u_BCHQP).transpose(2, 3)
    y_BCQHP = kept.y_BTHP.unflatten(1, (-1, chunks.size))
    torch.addcmul(local_BCQHP, _heads(carried_BCGQJ, heads), p.into_BCQH[..., None], out=y_BCQHP)
    kept.y_BTHP.addcmul_(inputs.x_BTHP, inputs.D_H[:, None])


class _ChunkedScan(torch.autograd.Function):
    """Keeps its inputs and ``_Kept``; computes ``_Pieces`` again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, chunks: Chunks, initial_BHPN: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = _Inputs(*tensors)
        x, Q = inputs.x_BTHP, chunks.size
        batch, tokens, heads, _ = x.shape
        num_chunks = tokens // Q
        kept = _Kept(
            torch.empty(x.shape, dtype=x.dtype, device=x.device),
            x.new_empty(batch, heads, num_chunks + 1, *initial_BHPN.shape[2:]),
            x.new_empty(batch, num_chunks, heads, Q, Q),
        )
        for rows in blocks(x):
            _forward_rows(inputs.rows(rows), initial_BHPN[rows], kept.rows(rows), chunks.rows(rows))
        ctx.save_for_backward(*inputs, *kept)
        ctx.chunks = chunks
        return kept.y_BTHP, kept.states_BHCPN[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, kept = _Inputs(*saved[:6]), _Kept(*saved[6:])
        x = inputs.x_BTHP
        # A's and D's gradients are summed over the rows, the others filled row by row.
        grads = _Inputs._make(
            value.new_zeros(value.shape) if value.dim() == 1 else value.new_empty(value.shape)
            for value in inputs
        )
        grad_initial = torch.empty_like(grad_final)
        for rows in blocks(x):
            grad_initial[rows] = _backward_rows(
                inputs.rows(rows),
                kept.rows(rows),
                ctx.chunks.rows(rows),
                grad_y[rows],
                grad_final[rows],
                grads.rows(rows),
            )
        return None, grad_initial, *grads


def _backward_rows(
    inputs: _Inputs,
    kept: _Kept,
    chunks: Chunks,
    grad_y_BTHP: Tensor,
    grad_final_BHPN: Tensor,
    grads: _Inputs,
) -> Tensor:
    """Fill the gradients of x, dt, B, C; add to those of A and D; returns the initial state's."""
    heads, groups, Q = inputs.x_BTHP.shape[2], inputs.B_BTGN.shape[2], chunks.size
    p = _pieces(inputs, kept.decay_BCHQQ, True, chunks)
    grad_y_BCHQP = grad_y_BTHP.unflatten(1, (-1, Q)).transpose(2, 3).contiguous()

    # y = mixing u: the scores' gradient, summed over a group's heads, and part of u's.
    grad_mixing = grad_y_BCHQP @ p.u_BCHQP.transpose(-1, -2)
    grad_scores = grad_mixing.mul_(kept.decay_BCHQQ).unflatten(2, (groups, -1)).sum(dim=3)
    grad_u_BCQHP = (p.mixing_BCHQQ.transpose(-1, -2) @ grad_y_BCHQP).transpose(2, 3)

    # y += into C . entering, then the states' passing, from the last boundary back.
    grad_carried_BCGQJ = _by_group(grad_y_BCHQP, p.into_BCQH, groups)
    grad_C = grad_scores @ p.B_BCGQN + grad_carried_BCGQJ @ _entering(kept.states_BHCPN, groups)
    grad_entering = grad_carried_BCGQJ.transpose(-1, -2) @ p.C_BCGQN
    grad_entering = grad_entering.unflatten(3, (heads // groups, -1)).flatten(2, 3)
    grad_states = torch.cat([grad_entering, grad_final_BHPN[:, None]], dim=1).transpose(1, 2)
    grad_added = p.passing_BHCC.transpose(-1, -2) @ grad_states.flatten(3)
    grad_added_BHCPN = grad_added.view(grad_states.shape)

    # What each chunk adds to the state: u's other part, and B's.
    grad_added_BCHPN = grad_added_BHCPN[:, :, 1:].transpose(1, 2)
    grad_added_BCGJN = grad_added_BCHPN.unflatten(2, (groups, -1)).flatten(3, 4)
    grad_leaving_BCGQJ = p.B_BCGQN @ grad_added_BCGJN.transpose(-1, -2)
    grad_u_BCQHP.addcmul_(_heads(grad_leaving_BCGQJ, heads), p.out_of_BCQH[..., None])
    leaving_BCGQJ = _by_group(p.u_BCHQP, p.out_of_BCQH, groups)
    grad_B = grad_scores.transpose(-1, -2) @ p.C_BCGQN + leaving_BCGQJ @ grad_added_BCGJN
    grads.B_BTGN.unflatten(1, (-1, Q)).copy_(grad_B.transpose(2, 3))
    grads.C_BTGN.unflatten(1, (-1, Q)).copy_(grad_C.transpose(2, 3))

    # Of l at each chunk's end, from all that comes later: the state there carries exp(l).
    ending_BCH = (grad_added_BHCPN * kept.states_BHCPN).sum(dim=(-1, -2))[:, :, 1:].transpose(1, 2)
    _backward_elementwise(inputs, kept.y_BTHP, chunks, grad_y_BTHP, grad_u_BCQHP, ending_BCH, grads)
    return grad_added_BHCPN[:, :, 0]


def _backward_elementwise(
    inputs: _Inputs,
    y_BTHP: Tensor,
    chunks: Chunks,
    grad_y_BTHP: Tensor,
    grad_u_BCQHP: Tensor,
    ending_BCH: Tensor,
    grads: _Inputs,
) -> None:
    """From the gradients of y and of u = dt x to those of x, dt, A and D."""
    x_BTHP, dt_BTH = inputs.x_BTHP, inputs.dt_BTH
    x_BCQHP, dt_BCQH = (value.unflatten(1, (-1, chunks.size)) for value in (x_BTHP, dt_BTH))
    skip_BTH = (grad_y_BTHP * x_BTHP).sum(dim=-1)
    grads.D_H.add_(skip_BTH.sum(dim=(0, 1)))
    use_BTH = (grad_u_BCQHP * x_BCQHP).sum(dim=-1).flatten(1, 2)
    grad_log_BTH = (grad_y_BTHP * y_BTHP).sum(dim=-1) - skip_BTH * inputs.D_H - use_BTH * dt_BTH
    grad_step_BTH = _reversed_running_sum(grad_log_BTH, ending_BCH, chunks)
    grads.A_H.add_((grad_step_BTH * dt_BTH).sum(dim=(0, 1)))
    torch.addcmul(use_BTH, grad_step_BTH, inputs.A_H, out=grads.dt_BTH)
    torch.mul(grad_u_BCQHP, dt_BCQH[..., None], out=grads.x_BTHP.unflatten(1, (-1, chunks.size)))
    grads.x_BTHP.addcmul_(grad_y_BTHP, inputs.D_H[:, None])


def _reversed_running_sum(value_BTH: Tensor, ending_BCH: Tensor, chunks: Chunks) -> Tensor:
    """At each token the sum of ``value`` from there to its document's end: within the chunk term by
    term, and ``ending`` for what comes after it. (Later chunks' terms would sum to the same, but
    they cancel, and their roundings would add up over the row.)"""
    value_BCQH = value_BTH.unflatten(1, (-1, chunks.size))
    leaves_BCQ = chunks.same[..., -1, :]
    local = chunks.same.transpose(-1, -2) @ value_BCQH
    return local.addcmul_(leaves_BCQ[..., None], ending_BCH[:, :, None]).flatten(1, 2)


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
