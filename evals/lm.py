"""What scoring asks of a language model, and our hybrid as one.

Legend: B rows, T positions, N selected positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from model import HybridModel
from model.generate import GenerationState, left_pad

State = TypeVar("State")
Stop = Callable[[int, list[int]], bool]


class LanguageModel(ABC, Generic[State]):
    """A causal model behind token ids.

    shares_prefixes: whether a context is computed once for all its continuations, by `prefill`,
    `select` and `extend`; else each continuation comes with its context.
    """

    shares_prefixes = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where tokens go."""

    @abstractmethod
    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """What the head reads, [B, T, D], of rows that begin at their first token."""

    @abstractmethod
    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V]."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, eos_id: int, should_stop: Stop
    ) -> list[list[int]]:
        """The greedy continuation of each prompt, at most `limit` tokens, without the EOS.

        should_stop(row, new tokens) ends a row.
        """

    def prefill(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[Tensor, State]:
        """The logits [B, V] after each prompt, and a state with room for so many more tokens."""
        raise NotImplementedError

    def select(self, state: State, rows: Sequence[int]) -> State:
        """The state of these rows, as often as they are named."""
        raise NotImplementedError

    def extend(self, tokens_BT: Tensor, state: State) -> Tensor:
        """What the head reads at each of T more tokens of every row, [B, T, D]."""
        raise NotImplementedError


class Hybrid(LanguageModel[GenerationState]):
    """Our model, in the precision that it stands in."""

    shares_prefixes = True

    def __init__(self, model: HybridModel) -> None:
        self.model = model.eval()

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.model.hidden(tokens_BT, torch.zeros_like(tokens_BT, dtype=torch.int32))

    def head(self, hidden_ND: Tensor) -> Tensor:
        return self.model.head(hidden_ND)

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, eos_id: int, should_stop: Stop
    ) -> list[list[int]]:
        return self.model.generate(prompts, limit, eos_id, should_stop=should_stop)

    def prefill(
        self, prompts: Sequence[Sequence[int]], room: int
    ) -> tuple[Tensor, GenerationState]:
        return self.model.prefill(*left_pad(prompts, self.device), room)

    def select(self, state: GenerationState, rows: Sequence[int]) -> GenerationState:
        return state.select(torch.tensor(rows, device=self.device))

    def extend(self, tokens_BT: Tensor, state: GenerationState) -> Tensor:
        return self.model.extend(tokens_BT, state)


def as_language_model(model: Any) -> LanguageModel:
    """A `HybridModel` as a `LanguageModel`; one that is such already, as it is."""
    return model if isinstance(model, LanguageModel) else Hybrid(model)
