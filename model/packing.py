"""Documents packed in a row: their numbers, and the masks that keep them apart.

One ``Packing`` is built per forward pass and shared by all blocks, so that no mixer derives
document boundaries on its own. Isolation is exact: a masked entry is multiplied by, or
exponentiated to, exactly zero, so that one document's values never reach another's bits.

Legend: B batch, T tokens in a row, K convolution taps, C chunks, Q tokens in a chunk.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def document_index(tokens_BT: Tensor, eos_id: int) -> Tensor:
    """The number of each token's document within its row, int32 [B, T], from 0.

    A document ends with its EOS, which belongs to it: ``[5, eos, 7, 8, eos, 9]`` gives
    ``[0, 0, 1, 1, 1, 2]``.
    """
    is_eos = (tokens_BT == eos_id).to(torch.int32)
    return (is_eos.cumsum(dim=1) - is_eos).to(torch.int32)


class Packing:
    """The document masks of one batch, each built on first use.

    ``seq_idx_BT`` int32 [B, T]: equal numbers mark one document, whose tokens are contiguous.
    """

    def __init__(self, seq_idx_BT: Tensor, compute_dtype: torch.dtype) -> None:
        if seq_idx_BT.dim() != 2 or seq_idx_BT.dtype != torch.int32:
            raise ValueError(
                f"seq_idx must be int32 [batch, tokens], got {seq_idx_BT.dtype} "
                f"{tuple(seq_idx_BT.shape)}; build it with model.document_index(tokens, eos_id)"
            )
        self.seq_idx_BT = seq_idx_BT
        self.compute_dtype = compute_dtype
        self.scan_dtype = torch.promote_types(compute_dtype, torch.float32)

    @cached_property
    def one_document_per_row(self) -> bool:
        """Whether plain causal masks serve."""
        return bool((self.seq_idx_BT == self.seq_idx_BT[:, :1]).all())

    @cached_property
    def attention_mask(self) -> Tensor:
        """Causal and same-document, 0 or -inf to add to the scores, [B, 1, T, T] in the compute
        dtype."""
        same_BTT = self.seq_idx_BT[:, :, None] == self.seq_idx_BT[:, None, :]
        return same_BTT.tril()[:, None].to(self.compute_dtype).log()

    @cached_property
    def bounds(self) -> Tensor:
        """Where each document begins in the flattened batch, and its end, int32 [documents + 1]."""
        starts_BT = torch.ones_like(self.seq_idx_BT, dtype=torch.bool)
        starts_BT[:, 1:] = self.seq_idx_BT[:, 1:] != self.seq_idx_BT[:, :-1]
        starts = starts_BT.flatten().nonzero().squeeze(1)
        return F.pad(starts, (0, 1), value=starts_BT.numel()).to(torch.int32)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.bounds.diff().max())

    def conv_mask(self, lag: int) -> Tensor | None:
        """[B, T - lag, 1], 1 where the token ``lag`` earlier is in the same document."""
        if self.one_document_per_row:
            return None
        masks = self.__dict__.setdefault("_conv_masks", {})
        if lag not in masks:
            same = self.seq_idx_BT[:, lag:] == self.seq_idx_BT[:, : self.seq_idx_BT.shape[1] - lag]
            masks[lag] = same[..., None].to(self.scan_dtype)
        return masks[lag]

    def chunks(self, chunk_size: int) -> Chunks:
        """The scan's masks for chunks of ``chunk_size`` tokens."""
        cache = self.__dict__.setdefault("_chunks", {})
        if chunk_size not in cache:
            cache[chunk_size] = Chunks(self.seq_idx_BT, chunk_size, self.scan_dtype)
        return cache[chunk_size]


class Chunks:
    """Same-document masks of rows cut into chunks, the rows' ends padded with their last document.

    ``same`` [B, C, Q, Q]: 1 where token s <= t of the same document (row t, column s).
    ``enters`` [B, C, Q]: 1 where the token's document was running when the chunk began.
    ``between`` [B, C+1, C+1]: 1 where boundary j <= i of the same document (row i, column j);
    boundary 0 is the row's start, boundary C its end.
    ``same_log`` and ``between_log`` hold their logarithms, 0 and -inf, to add to log-decays.
    """

    def __init__(self, seq_idx_BT: Tensor, chunk_size: int, dtype: torch.dtype) -> None:
        batch, tokens = seq_idx_BT.shape
        self.size = chunk_size
        self.padding = -tokens % chunk_size
        padded = torch.cat([seq_idx_BT, seq_idx_BT[:, -1:].expand(batch, self.padding)], dim=1)
        seq_BCQ = padded.view(batch, -1, chunk_size)
        boundary = torch.cat([seq_BCQ[:, :1, 0], seq_BCQ[:, :, -1]], dim=1)
        same = (seq_BCQ[..., :, None] == seq_BCQ[..., None, :]).tril()
        between = (boundary[:, :, None] == boundary[:, None, :]).tril()
        self.same, self.between = same.to(dtype), between.to(dtype)
        self.same_log, self.between_log = self.same.log(), self.between.log()
        self.enters = (seq_BCQ == boundary[:, :-1, None]).to(dtype)

    def rows(self, rows: slice) -> Chunks:
        """The same of some rows only."""
        part = copy(self)
        for name in ("same", "same_log", "between", "between_log", "enters"):
            setattr(part, name, getattr(self, name)[rows])
        return part
