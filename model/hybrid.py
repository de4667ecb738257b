"""The hybrid Mamba-Transformer: embedding, pre-norm residual blocks, final norm, head.

Legend: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model import backends, generate
from model.attention import Attention
from model.compiling import keep_outside
from model.config import BLOCK_KINDS, ModelConfig
from model.ffn import FeedForward
from model.init import init_weights
from model.linear import Linear
from model.loss import IGNORED, chunked_cross_entropy, token_cross_entropy
from model.mamba2 import Mamba2
from model.norms import RMSNorm
from model.packing import Packing

Checkpointing = Literal["none", "selective", "full"]
RECOMPILE_LIMIT = 64
"""Graphs of one function before torch.compile gives up on it: kinds of block, batch shapes, packed
or not, with and without gradient."""


class Block(nn.Module):
    """``x + mixer(norm(x))``, the mixer under its kind's name: mamba, ffn or attention."""

    def __init__(self, kind: str, config: ModelConfig, recompute_core: bool) -> None:
        super().__init__()
        self.kind = kind
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if kind == "mamba":
            self.mamba = Mamba2(config, recompute_core)
        elif kind == "ffn":
            self.ffn = FeedForward(config, recompute_core)
        else:
            self.attention = Attention(config)

    def forward(self, x_BTD: Tensor, packing: Packing, cache: Any = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; fills the mixer's ``cache`` where given."""
        normed = self.norm(x_BTD)
        if self.kind == "ffn":
            return x_BTD + self.ffn(normed)
        mixer = self.mamba if self.kind == "mamba" else self.attention
        return x_BTD + mixer(normed, packing, cache)

    def step(self, x_BD: Tensor, cache: Any, visible_BS: Tensor) -> Tensor:
        """One token: [B, D] -> [B, D]; updates ``cache``."""
        normed = self.norm(x_BD)
        if self.kind == "ffn":
            return x_BD + self.ffn(normed)
        if self.kind == "mamba":
            return x_BD + self.mamba.step(normed, cache)
        return x_BD + self.attention.step(normed, cache, visible_BS)

    def extend(self, x_BTD: Tensor, cache: Any, visible_BS: Tensor) -> Tensor:
        """T more tokens: [B, T, D] -> [B, T, D]; updates ``cache``."""
        normed = self.norm(x_BTD)
        if self.kind == "ffn":
            return x_BTD + self.ffn(normed)
        if self.kind == "mamba":
            return x_BTD + self.mamba.extend(normed, cache)
        return x_BTD + self.attention.extend(normed, cache, visible_BS)


class HybridModel(nn.Module):
    """A language model over packed documents.

    Parameters are FP32; activations have ``compute_dtype``. ``activation_checkpointing``: ``none``
    keeps all activations, ``selective`` recomputes what lies between the linears (convolution,
    scan, gated norm, squared ReLU), ``full`` keeps only each block's input. All three give the same
    bits. Build it under ``torch.device("meta")``, shard it, then call ``model.init.materialize``:
    no rank ever holds the whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        compute_dtype: torch.dtype = torch.float32,
        activation_checkpointing: Checkpointing = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if activation_checkpointing not in ("none", "selective", "full"):
            raise ValueError(
                f"activation_checkpointing={activation_checkpointing!r} must be 'none', "
                "'selective' or 'full'"
            )
        self.config = config
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = activation_checkpointing
        self.compiled_by: str | None = None
        selective = activation_checkpointing == "selective"
        self.embedding = nn.Embedding(
            config.vocab_size,
            config.hidden_size,
            _weight=torch.empty(config.vocab_size, config.hidden_size, dtype=torch.float32),
        )
        self.blocks = nn.ModuleList(
            Block(BLOCK_KINDS[char], config, selective) for char in config.pattern
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        self.tie_head()
        if self.embedding.weight.device.type != "meta":
            init_weights(self, seed)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Run the blocks through ``torch.compile``, which fuses what lies between the products.

        Convolution, scan and the linears that a precision policy has swapped stay outside the
        graphs, as written. Blocks of a kind share graphs; each shape of a batch has its own, cached
        on disk by the ``inductor`` backend. What is fused may round its last bits otherwise, and so
        may what ``selective`` checkpointing recomputes there.
        """
        keep_outside()
        for block in self.blocks:
            block.compile(backend=backend, dynamic=False, recompile_limit=RECOMPILE_LIMIT)
        self.compiled_by = backend

    def tie_head(self) -> None:
        """Let head and embedding be one parameter, where the configuration ties them."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def hidden(
        self, tokens_BT: Tensor, seq_idx_BT: Tensor, caches: list[Any] | None = None
    ) -> Tensor:
        """The final norm's output [B, T, D] in the compute dtype."""
        packing = Packing(seq_idx_BT, self.compute_dtype)
        x_BTD = self.embedding(tokens_BT).to(self.compute_dtype)
        recompute = self.activation_checkpointing == "full" and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            if recompute:
                x_BTD = checkpoint(
                    block, x_BTD, packing, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BTD = block(x_BTD, packing, caches[i] if caches else None)
        return self.norm(x_BTD)

    def loss(
        self, tokens_BT: Tensor, labels_BT: Tensor, seq_idx_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The summed next-token loss (FP32 scalar) and the count of valid labels (int64 scalar).

        ``labels`` are already shifted: ``labels[b, t]`` follows ``tokens[b, t]``; -100 is ignored.
        A sum, not a mean: divide by the global count, so that no batch split changes the gradient.
        """
        x_MD = self.hidden(tokens_BT, seq_idx_BT).flatten(0, 1)
        labels_M = labels_BT.flatten()
        loss = chunked_cross_entropy(self.head, x_MD, labels_M, self.config.vocab_size)
        return loss, (labels_M != IGNORED).sum()

    forward = loss

    def logits(self, tokens_BT: Tensor, seq_idx_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in FP32 (FP64 for an FP64 model)."""
        logits = self.head(self.hidden(tokens_BT, seq_idx_BT))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def token_losses(self, tokens_BT: Tensor, labels_BT: Tensor, seq_idx_BT: Tensor) -> Tensor:
        """Each token's loss [B, T] in FP32, 0 where the label is ignored. No gradient."""
        x_MD = self.hidden(tokens_BT, seq_idx_BT).flatten(0, 1)
        losses_M = token_cross_entropy(self.head, x_MD, labels_BT.flatten(), self.config.vocab_size)
        return losses_M.view(labels_BT.shape)

    def prefill(
        self, tokens_BT: Tensor, seq_idx_BT: Tensor, max_new_tokens: int
    ) -> tuple[Tensor, generate.GenerationState]:
        """See ``model.generate.prefill``."""
        return generate.prefill(self, tokens_BT, seq_idx_BT, max_new_tokens)

    def step(self, tokens_B: Tensor, state: generate.GenerationState) -> Tensor:
        """See ``model.generate.step``."""
        return generate.step(self, tokens_B, state)

    def extend(self, tokens_BT: Tensor, state: generate.GenerationState) -> Tensor:
        """See ``model.generate.extend``."""
        return generate.extend(self, tokens_BT, state)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_id: int, **settings: Any
    ) -> list[list[int]]:
        """See ``model.generate.generate``."""
        return generate.generate(self, prompts, max_new_tokens, eos_id, **settings)

    def paths(self) -> dict[str, str]:
        """Which implementation runs each kind of block on the model's device, for the log."""
        return backends.paths(self.config, self.embedding.weight.device, self.compute_dtype)
