"""The byte-level BPE tokenizer: trained here, or loaded from a `tokenizer.json`.

Byte-level means that a token's string has one character for each byte of text, so decoding is exact
and losses can be given in bits per byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.config import ConfigError, TokenizerConfig

TOKENIZER_FILE = "tokenizer.json"
MIN_VOCAB_SIZE = 257  # every byte, and the end of a document


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """A BPE of at most `config.vocab_size` ids; id 0 ends a document, then come the 256 bytes.

    The same texts in the same order give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[config.eos_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: Path | str) -> Tokenizer:
    """A tokenizer that takes text for text: a special token's name in it is ordinary characters.

    Raises `ConfigError` if the file is absent, damaged or not byte-level.
    """
    _read(Path(path))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_tokenizer(config: TokenizerConfig) -> None:
    """What can be said before any text is read. Raises `ConfigError`."""
    if config.path is None:
        if len(config.eos_token) < 2:
            raise ConfigError(
                f"data.tokenizer.eos_token={config.eos_token!r}: a character of text cannot end "
                "documents; choose a longer token such as <|endoftext|>"
            )
        if config.vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(
                f"data.tokenizer.vocab_size: a byte-level tokenizer needs {MIN_VOCAB_SIZE} at "
                f"least, got {config.vocab_size}"
            )
    elif load_tokenizer(config.path).token_to_id(config.eos_token) is None:
        raise ConfigError(
            f"data.tokenizer.eos_token: {config.path} has no token {config.eos_token!r}; name the "
            "one that ends a document there"
        )


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """The highest id, plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def encode_documents(tokenizer: Tokenizer, texts: list[str], eos_id: int) -> list[NDArray[Any]]:
    """The ids of each text, followed by one end-of-document token."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([*encoding.ids, eos_id]) for encoding in encodings]


def read_token_bytes(path: Path) -> NDArray[np.int64]:
    """Bytes of text that each id stands for [vocab_size]; 0 for special tokens and unused ids."""
    content = _read(path)
    lengths = {id_: len(token) for token, id_ in content["model"]["vocab"].items()}
    for added in content["added_tokens"]:
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    out = np.zeros(max(lengths) + 1, dtype=np.int64)
    out[list(lengths)] = list(lengths.values())
    return out


def _read(path: Path) -> dict[str, Any]:
    """The JSON of a byte-level tokenizer."""
    if not path.is_file():
        raise ConfigError(f"data.tokenizer.path: no file {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        decoder = content["decoder"] or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
        content["model"]["vocab"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.tokenizer.path: {path} is no tokenizer.json with a vocabulary ({error!r})"
        ) from None
    if "ByteLevel" not in kinds:
        raise ConfigError(
            f"data.tokenizer.path: {path} is not byte-level (decoder {sorted(kinds)}); the length "
            "of its tokens in bytes is unknown, so losses could not be compared"
        )
    return content
