"""Tokenizers: a byte-level BPE trained here, or any Hugging Face or tekken one that loses no text.

Each id must stand for a known number of bytes, so that losses can be given in bits per byte: byte-
level vocabularies (one character for each byte), and SentencePiece-like ones with byte fallback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.config import ConfigError, TokenizerConfig
from pipeline.data import tekken

TOKENIZER_FILE = "tokenizer.json"
TEKKEN = "tekken.json"
MIN_VOCAB_SIZE = 257  # every byte, and the end of a document
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_KEY = "data.tokenizer.path"


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """A BPE of at most `config.vocab_size` ids; id 0 ends a document, then come the 256 bytes.

    The same texts in the same order give the same tokenizer. A beginning-of-document token, if
    configured, is id 1.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[config.eos_token, *([config.bos_token] if config.bos_token else [])],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(name: Path | str) -> Tokenizer:
    """A tokenizer that takes text for text: a special token's name in it is ordinary characters.

    `name` is as in `tokenizer_json`. Raises `ConfigError` if it is absent, damaged or loses text.
    """
    content = tokenizer_json(name)
    _checked(content, name)
    tokenizer = Tokenizer.from_str(content)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # models are stored with what their inputs were cut and filled to
    tokenizer.no_padding()
    return tokenizer


def tokenizer_json(name: Path | str) -> str:
    """The `tokenizer.json` of a file, a folder that holds one, or a name on the Hugging Face hub.

    A `tekken.json`, or the name `tekken` for mistral-common's, is converted. Raises `ConfigError`.
    """
    path = Path(name).expanduser()
    if str(name) == tekken.NAME and not path.exists():
        path = tekken.installed_tekken()
    if path.is_dir():
        found = [path / file for file in (TOKENIZER_FILE, TEKKEN) if (path / file).is_file()]
        if not found:
            raise ConfigError(f"{_KEY}: no {TOKENIZER_FILE} in {path}")
        path = found[0]
    if not path.is_file():
        path = _from_hub(str(name))
    return _json_of(path, path.stat().st_mtime_ns)


@lru_cache(4)
def _json_of(path: Path, _mtime: int) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        return tekken.convert(content).to_str() if tekken.is_tekken(content) else text
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{_KEY}: {path} is no tokenizer.json ({error!r})") from None


def _from_hub(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{_KEY}: no file {name}, and no name on the hub (owner/name) either")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, TOKENIZER_FILE))
    except Exception as error:  # a different class for each way in which a hub can be away
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{_KEY}: no file {name}, nor {name} on the hub ({reason})") from None


def check_tokenizer(config: TokenizerConfig) -> None:
    """What can be said before any text is read. Raises `ConfigError`."""
    if config.bos_token == config.eos_token:
        raise ConfigError(
            f"data.tokenizer.bos_token={config.bos_token!r} ends documents already; name another, "
            "or null for none"
        )
    if config.path is None:
        for key, does in (("eos_token", "end"), ("bos_token", "begin")):
            token = getattr(config, key)
            if token is not None and len(token) < 2:
                raise ConfigError(
                    f"data.tokenizer.{key}={token!r}: a character of text cannot {does} "
                    "documents; choose a longer token such as <|endoftext|>"
                )
        least = MIN_VOCAB_SIZE + bool(config.bos_token)
        if config.vocab_size < least:
            raise ConfigError(
                f"data.tokenizer.vocab_size: a byte-level tokenizer needs {least} at "
                f"least, got {config.vocab_size}"
            )
        return
    tokenizer = load_tokenizer(config.path)
    for key in ("eos_token", "bos_token"):
        token = getattr(config, key)
        if token is not None and tokenizer.token_to_id(token) is None:
            raise ConfigError(
                f"data.tokenizer.{key}: {config.path} has no token {token!r}; name the one that "
                f"{'ends' if key == 'eos_token' else 'begins'} a document there"
            )


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """The highest id, plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def encode_documents(
    tokenizer: Tokenizer,
    texts: list[str],
    eos_id: int,
    bos_id: int | None = None,
    dtype: np.dtype[Any] | None = None,
) -> list[NDArray[Any]]:
    """The ids of each text between `bos_id`, if there is one, and one end-of-document token."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    first = [] if bos_id is None else [bos_id]
    return [np.array([*first, *encoding.ids, eos_id], dtype) for encoding in encodings]


def read_token_bytes(path: Path) -> NDArray[np.int64]:
    """Bytes of text that each id stands for [vocab_size]; 0 for special tokens and unused ids."""
    content = _checked(tokenizer_json(path), path)
    vocab = content["model"]["vocab"]
    tokens = vocab.items() if isinstance(vocab, dict) else ((t[0], i) for i, t in enumerate(vocab))
    byte_level = "ByteLevel" in _decoders(content)
    lengths = {i: len(token) if byte_level else _spelled_bytes(token) for token, i in tokens}
    for added in content["added_tokens"]:
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    out = np.zeros(max(lengths) + 1, dtype=np.int64)
    out[list(lengths)] = list(lengths.values())
    return out


def _spelled_bytes(token: str) -> int:
    """Bytes of a SentencePiece-like token: `<0x0A>` is one, and the mark of a space is a space."""
    return 1 if _BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())


def _decoders(content: dict[str, Any]) -> set[str]:
    decoder = content["decoder"] or {}
    return {part["type"] for part in decoder.get("decoders", [decoder]) if part}


def _checked(text: str, name: Path | str) -> dict[str, Any]:
    """The parsed JSON of a tokenizer that loses no text."""
    try:
        content = json.loads(text)
        kinds = _decoders(content)
        len(content["model"]["vocab"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{_KEY}: {name} is no tokenizer.json with a vocabulary ({error!r})"
        ) from None
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise ConfigError(
            f"{_KEY}: {name} is not byte-level and has no byte fallback (decoder {sorted(kinds)}); "
            "it loses text, and the length of its tokens in bytes is unknown, so losses could not "
            "be compared"
        )
    return content
