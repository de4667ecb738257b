"""Grouped-query causal attention within documents, with or without rotary positions.

Legend: B batch, T tokens, D hidden size, H heads, E head dim, S cached positions, N = B T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from model.backends import varlen_attention
from model.config import ModelConfig
from model.linear import Linear
from model.packing import Packing


@dataclass
class AttentionCache:
    """Keys and values of the positions seen so far, in buffers of the final length."""

    key_BHSE: Tensor
    value_BHSE: Tensor
    length: int = 0

    def append(self, key_BHTE: Tensor, value_BHTE: Tensor) -> None:
        """Store T more positions."""
        end = self.length + key_BHTE.shape[2]
        self.key_BHSE[:, :, self.length : end] = key_BHTE
        self.value_BHSE[:, :, self.length : end] = value_BHTE
        self.length = end


def rotate(x_BHTE: Tensor, theta: float, offset: int) -> Tensor:
    """Rotary embedding (arXiv 2104.09864), halves convention, positions from ``offset``, in FP32.

    Scores depend on position differences only, so a document need not start at position 0.
    """
    tokens, head_dim = x_BHTE.shape[-2:]
    wide = torch.promote_types(x_BHTE.dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=x_BHTE.device, dtype=wide) / head_dim
    position = torch.arange(offset, offset + tokens, device=x_BHTE.device, dtype=wide)
    angle = position[:, None] * theta**-exponent
    cos, sin = angle.cos(), angle.sin()
    first, second = x_BHTE.to(wide).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x_BHTE.dtype)


class Attention(nn.Module):
    """qkv -> scaled dot-product attention -> o."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = Linear(config.hidden_size, config.attention_size + 2 * config.attention_kv_size)
        self.o = Linear(config.attention_size, config.hidden_size)

    def forward(
        self, x_BTD: Tensor, packing: Packing, cache: AttentionCache | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]; fills ``cache``, where given, for ``step``."""
        query, key, value = self._split_heads(self.qkv(x_BTD), offset=0)
        if cache is not None:
            cache.append(key, value)
        if packing.one_document_per_row:
            return self._attend(query, key, value, None, is_causal=True)
        by_document = varlen_attention(self.config, query.device, query.dtype)
        if by_document is None:
            return self._attend(query, key, value, packing.attention_mask, is_causal=False)
        y_NHE = by_document(
            *(part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)),
            packing.bounds,
            packing.bounds,
            packing.longest,
            packing.longest,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        return self.o(y_NHE.flatten(1).view(*x_BTD.shape[:2], -1))

    def step(self, x_BD: Tensor, cache: AttentionCache, visible_BS: Tensor) -> Tensor:
        """One token: [B, D] -> [B, D]; ``visible`` marks the cached positions to attend to."""
        query, key, value = self._split_heads(self.qkv(x_BD[:, None]), offset=cache.length)
        cache.append(key, value)
        seen = slice(0, cache.length)
        mask = visible_BS[:, None, None, seen]
        keys, values = cache.key_BHSE[:, :, seen], cache.value_BHSE[:, :, seen]
        return self._attend(query, keys, values, mask, is_causal=False)[:, 0]

    def extend(self, x_BTD: Tensor, cache: AttentionCache, visible_BS: Tensor) -> Tensor:
        """T more tokens of every row: [B, T, D] -> [B, T, D]; updates ``cache``."""
        tokens, start = x_BTD.shape[1], cache.length
        query, key, value = self._split_heads(self.qkv(x_BTD), offset=start)
        cache.append(key, value)
        seen = slice(0, cache.length)
        causal_TS = visible_BS.new_ones(tokens, cache.length).tril(start)
        mask = (visible_BS[:, None, seen] & causal_TS)[:, None]
        keys, values = cache.key_BHSE[:, :, seen], cache.value_BHSE[:, :, seen]
        return self._attend(query, keys, values, mask, is_causal=False)

    def _split_heads(self, qkv_BTX: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        sizes = [config.attention_size, config.attention_kv_size, config.attention_kv_size]
        query, key, value = (
            part.unflatten(-1, (-1, config.attention_head_dim)).transpose(1, 2)
            for part in qkv_BTX.split(sizes, dim=-1)
        )
        if config.rope_theta is not None:
            query = rotate(query, config.rope_theta, offset)
            key = rotate(key, config.rope_theta, offset)
        return query, key, value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        gqa = key.shape[1] != query.shape[1]
        if gqa and mask is not None and query.is_cuda:
            # No fused CUDA kernel takes a mask and shared heads; the fallback holds all scores.
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
            gqa = False
        y_BHTE = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=gqa
        )
        return self.o(y_BHTE.transpose(1, 2).flatten(2))
