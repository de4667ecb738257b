"""Tokenizers as scoring asks for them: ours, and those of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer


class TextTokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """special: whether to add the tokens that begin or end texts; None: as it is set up."""
        ...

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str: ...


class Plain:
    """A `tokenizers.Tokenizer` that adds no special token, or `bos_id` before a text."""

    def __init__(self, tokenizer: Tokenizer, bos_id: int | None = None) -> None:
        self.tokenizer, self.bos_id = tokenizer, bos_id

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        first = [] if self.bos_id is None or special is False else [self.bos_id]
        return [*first, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=not keep_special)


class OfTransformers:
    """A transformers tokenizer, set up as its folder says."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        begun = self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token)
        if special is None and begun:
            special = False
        settings = {} if special is None else {"add_special_tokens": special}
        return self.tokenizer.encode(text, **settings)

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=not keep_special)
