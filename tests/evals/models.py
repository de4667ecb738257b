"""Small models and a tokenizer for the tests of scoring, and models of known skill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from evals.lm import LanguageModel, Stop
from model import HybridModel, ModelConfig

EOS = 256


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """One token a byte, the end of a document, and a token for each merge after it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {left + right: EOS + 1 + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab | {"<|endoftext|>": EOS}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == EOS
    return tokenizer


def small_hybrid(pattern: str = "M-*", vocab_size: int = EOS + 1, seed: int = 0) -> HybridModel:
    """A hybrid whose weights are large enough to have opinions."""
    config = ModelConfig(
        pattern=pattern,
        vocab_size=vocab_size,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=2,
        num_kv_heads=1,
        attention_head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        mamba_state_size=8,
        mamba_num_groups=1,
        mamba_chunk_size=16,
        init_std=0.2,
    )
    return HybridModel(config, seed=seed).eval()


class Uniform(LanguageModel[None]):
    """Every token is as likely as any other; what it says is `answer`."""

    def __init__(self, tokenizer: Tokenizer | None = None, answer: str = "") -> None:
        self.answer = tokenizer.encode(answer).ids if tokenizer else []
        self.num_hidden = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        self.num_hidden += 1
        return torch.zeros(*tokens_BT.shape, EOS + 1)

    def head(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, eos_id: int, should_stop: Stop
    ) -> list[list[int]]:
        return [self.answer[:limit] for _ in prompts]


class KnowsTheTexts(Uniform):
    """Is sure of the next byte wherever the last ones occur in its texts."""

    SEEN = 40  # more than a line, so that the line number is among them

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.following = {
            tuple(text[end - self.SEEN : end]): text[end]
            for text in texts
            for end in range(self.SEEN, len(text))
        }

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        logits = super().hidden(tokens_BT)
        for row, tokens in enumerate(tokens_BT.tolist()):
            for end in range(self.SEEN, len(tokens) + 1):
                following = self.following.get(tuple(tokens[end - self.SEEN : end]))
                if following is not None:
                    logits[row, end - 1, following] = 20.0
        return logits
