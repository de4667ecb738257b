"""Mamba-2's scan as matrix products over chunks (state-space duality, arXiv 2405.21060).

Per head, with state S [P, N]:  S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t.
Within a chunk of Q tokens the outputs are a masked, decayed attention ``(C B^T * decay) x``; across
chunks only the states travel, combined by one more decay matrix over chunk boundaries. Sums of
log-decays restart at each document, so that no rounding crosses a boundary.

Legend: B batch, T tokens, C chunks, Q tokens in a chunk, H heads, G groups of heads (each with one
B and C), R heads in a group, P head dim, N state size.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    batch, tokens, heads, head_dim = x_BTHP.shape
    groups, state = B_BTGN.shape[2:]
    per_group, Q = heads // groups, chunks.size

    def cut(tensor: Tensor) -> Tensor:
        if chunks.padding:
            tensor = torch.nn.functional.pad(
                tensor, (0, 0) * (tensor.dim() - 2) + (0, chunks.padding)
            )
        return tensor.reshape(batch, -1, Q, *tensor.shape[2:])

    x_BCHQP = cut(x_BTHP).transpose(2, 3)
    dt_BCQH = cut(dt_BTH)
    B_BCGQN, C_BCGQN = cut(B_BTGN).transpose(2, 3), cut(C_BTGN).transpose(2, 3)
    num_chunks = x_BCHQP.shape[1]

    # Log-decay from the document's (or chunk's) start up to and including each token.
    log_BCHQ = (chunks.same_float @ (dt_BCQH * A_H)).transpose(2, 3)
    decay_BCHQQ = torch.exp(
        (log_BCHQ[..., :, None] - log_BCHQ[..., None, :]).masked_fill(
            ~chunks.same[:, :, None], -torch.inf
        )
    )
    weights_BCHQQ = decay_BCHQQ * dt_BCQH.transpose(2, 3)[..., None, :]
    scores_BCGQQ = C_BCGQN @ B_BCGQN.transpose(-1, -2)
    mixing = weights_BCHQQ.view(batch, num_chunks, groups, per_group, Q, Q)
    mixing = (mixing * scores_BCGQQ[:, :, :, None]).flatten(2, 3)
    mixing = mixing + torch.diag_embed(D_H[:, None].expand(heads, Q))
    y_BCHQP = mixing @ x_BCHQP

    # What each chunk adds to the state at its end, then the state at each boundary.
    scaled_BCHPQ = (x_BCHQP * weights_BCHQQ[..., -1, :, None]).transpose(-1, -2)
    grouped = scaled_BCHPQ.reshape(batch, num_chunks, groups, per_group * head_dim, Q)
    added_BCHPN = (grouped @ B_BCGQN).view(batch, num_chunks, heads, head_dim, state)
    if initial_state_BHPN is None:
        initial_state_BHPN = torch.zeros_like(added_BCHPN[:, 0])
    added_BCHPN = torch.cat([initial_state_BHPN[:, None], added_BCHPN], dim=1)
    total_BCH = torch.nn.functional.pad(log_BCHQ[..., -1], (0, 0, 1, 0))
    boundary_BHC = (chunks.between_float @ total_BCH).transpose(1, 2)
    passing_BHCC = torch.exp(
        (boundary_BHC[..., :, None] - boundary_BHC[..., None, :]).masked_fill(
            ~chunks.between[:, None], -torch.inf
        )
    )
    states_BHCPN = (passing_BHCC @ added_BCHPN.transpose(1, 2).flatten(3)).view(
        batch, heads, num_chunks + 1, head_dim, state
    )

    # What the state at a chunk's start gives to the chunk's tokens.
    entering = states_BHCPN[:, :, :-1].transpose(1, 2)
    entering = entering.reshape(batch, num_chunks, groups, per_group * head_dim, state)
    carried = (C_BCGQN @ entering.transpose(-1, -2)).view(
        batch, num_chunks, groups, Q, per_group, head_dim
    )
    carried_BCHQP = carried.transpose(3, 4).flatten(2, 3)
    reach_BCHQ = torch.exp(log_BCHQ.masked_fill(~chunks.enters[:, :, None], -torch.inf))
    y_BCHQP = y_BCHQP + carried_BCHQP * reach_BCHQ[..., None]

    y_BTHP = y_BCHQP.transpose(2, 3).reshape(batch, -1, heads, head_dim)[:, :tokens]
    return y_BTHP, states_BHCPN[:, :, -1]


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
