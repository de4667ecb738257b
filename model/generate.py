"""Generation with caches: prefill a batch of left-padded prompts, then step token by token.

Legend: B batch, T prompt tokens, S cached positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from model.attention import AttentionCache
from model.mamba2 import MambaCache

if TYPE_CHECKING:
    from model.hybrid import Block, HybridModel


@dataclass
class GenerationState:
    """One cache a block (None for feed-forward), and the positions each row attends to."""

    caches: list[AttentionCache | MambaCache | None]
    visible_BS: Tensor

    def select(self, rows_B: Tensor) -> GenerationState:
        """The state of these rows, in this order and as often as named; the original stays."""
        return GenerationState(
            [_selected(cache, rows_B) for cache in self.caches], self.visible_BS[rows_B]
        )


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts -> tokens [B, T] and seq_idx int32 [B, T]: the padding is a document of its own."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("every prompt needs at least one token; put a BOS or EOS token first")
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    seq_idx = torch.zeros(len(prompts), width, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        seq_idx[row, width - len(prompt) :] = 1
    return tokens.to(device), seq_idx.to(device)


@torch.no_grad()
def prefill(
    model: HybridModel, tokens_BT: Tensor, seq_idx_BT: Tensor, max_new_tokens: int
) -> tuple[Tensor, GenerationState]:
    """The next token's logits [B, V] after each row's last document, and the state to continue."""
    batch, length = tokens_BT.shape
    state = GenerationState(
        [
            _empty_cache(model, kind, batch, length + max_new_tokens)
            for kind in model.config.pattern
        ],
        _visible(seq_idx_BT, max_new_tokens),
    )
    x_BTD = model.hidden(tokens_BT, seq_idx_BT, state.caches)
    return model.head(x_BTD[:, -1]).float(), state


@torch.no_grad()
def step(model: HybridModel, tokens_B: Tensor, state: GenerationState) -> Tensor:
    """Feed one token a row: the next token's logits [B, V]; updates ``state``."""
    x_BD = model.embedding(tokens_B).to(model.compute_dtype)
    for block, cache in zip(model.blocks, state.caches, strict=True):
        x_BD = cast("Block", block).step(x_BD, cache, state.visible_BS)
    return model.head(model.norm(x_BD)).float()


@torch.no_grad()
def extend(model: HybridModel, tokens_BT: Tensor, state: GenerationState) -> Tensor:
    """Feed T tokens a row at once: the final norm's output [B, T, D]; updates ``state``.

    Rows shorter than T are padded on the right; the state then serves only the longest of them.
    """
    x_BTD = model.embedding(tokens_BT).to(model.compute_dtype)
    for block, cache in zip(model.blocks, state.caches, strict=True):
        x_BTD = cast("Block", block).extend(x_BTD, cache, state.visible_BS)
    return model.norm(x_BTD)


def generate(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_id: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    should_stop: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue each prompt; returns the new tokens, without the EOS that ends a row.

    ``temperature=0`` is greedy. Otherwise each row samples from the smallest set of tokens whose
    probability reaches ``top_p``, with draws that depend on (seed, row) alone.
    ``should_stop(row, new_tokens)`` may end a row early, e.g. on a stop string.
    Raises ValueError on an empty prompt and on settings out of range.
    """
    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 1:
        raise ValueError(
            f"temperature={temperature} must be >= 0, top_p={top_p} in (0, 1], "
            f"max_new_tokens={max_new_tokens} >= 1"
        )
    tokens_BT, seq_idx_BT = left_pad(prompts, model.embedding.weight.device)
    logits_BV, state = prefill(model, tokens_BT, seq_idx_BT, max_new_tokens)
    generators = [
        torch.Generator().manual_seed(seed * 1_000_003 + row) for row in range(len(prompts))
    ]
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for position in range(max_new_tokens):
        next_B = _choose(logits_BV, temperature, top_p, generators)
        for row, token in enumerate(next_B.tolist()):
            if done[row]:
                continue
            if token == eos_id:
                done[row] = True
                continue
            outputs[row].append(token)
            done[row] = should_stop is not None and should_stop(row, outputs[row])
        if all(done) or position + 1 == max_new_tokens:
            break
        logits_BV = step(model, next_B, state)
    return outputs


def _choose(
    logits_BV: Tensor, temperature: float, top_p: float, generators: list[torch.Generator]
) -> Tensor:
    """The next token of each row [B]: the best, or a draw from the top-p set."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    probs, order = (logits_BV / temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= top_p, 0)
    draws = torch.stack([torch.rand((), generator=generator) for generator in generators])
    target = draws.to(probs.device)[:, None] * probs.sum(dim=-1, keepdim=True)
    rank = (probs.cumsum(dim=-1) <= target).sum(dim=-1, keepdim=True)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(1, rank.minimum(last)).squeeze(1)


def _visible(seq_idx_BT: Tensor, max_new_tokens: int) -> Tensor:
    """Positions of each row's last document, and all to come: bool [B, S]."""
    to_come = seq_idx_BT.new_ones(seq_idx_BT.shape[0], max_new_tokens, dtype=torch.bool)
    return torch.cat([seq_idx_BT == seq_idx_BT[:, -1:], to_come], dim=1)


def _selected(
    cache: AttentionCache | MambaCache | None, rows_B: Tensor
) -> AttentionCache | MambaCache | None:
    if isinstance(cache, AttentionCache):
        return AttentionCache(cache.key_BHSE[rows_B], cache.value_BHSE[rows_B], cache.length)
    if isinstance(cache, MambaCache):
        return MambaCache(cache.conv_BKC[rows_B], cache.state_BHPN[rows_B])
    return None


def _empty_cache(
    model: HybridModel, kind: str, batch: int, length: int
) -> AttentionCache | MambaCache | None:
    if kind == "-":
        return None
    config, device = model.config, model.embedding.weight.device
    if kind == "M":
        return MambaCache(torch.empty(0), torch.empty(0))
    shape = (batch, config.num_kv_heads, length, config.attention_head_dim)
    key, value = (torch.zeros(shape, dtype=model.compute_dtype, device=device) for _ in range(2))
    return AttentionCache(key, value)
