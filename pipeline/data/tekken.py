"""Mistral's tekken vocabulary as a Hugging Face tokenizer.

A `tekken.json` lists byte sequences by rank, and byte pairs are merged in the order of rank, as in
tiktoken. Its first ids are control tokens; `default_vocab_size` ids are used (131,072), fewer than
the file has ranks for. Hugging Face wants the merges themselves: a token's merge is the one that
makes it out of two earlier ones.
"""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pipeline.config import ConfigError

NAME = "tekken"  # the newest of the installed mistral-common
END = "</s>"


def installed_tekken() -> Path:
    """The newest tekken file of the mistral-common package. Raises `ConfigError` without it."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "data.tokenizer.path=tekken: mistral-common is not installed; "
            'pip install "nvfp4-pretrain[tekken]", or give the path of a tekken.json'
        )
    return max((Path(spec.origin).parent / "data").glob("tekken_*.json"))


def is_tekken(content: Any) -> bool:
    """Whether parsed JSON has the form of a tekken file."""
    return isinstance(content, dict) and {"config", "vocab"} <= content.keys()


def convert(content: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a tekken file: the same ids as mistral-common gives, and its names."""
    config = content["config"]
    num_special = config["default_num_special_tokens"]
    ranked = [
        base64.b64decode(entry["token_bytes"])
        for entry in content["vocab"][: config["default_vocab_size"] - num_special]
    ]
    names = [f"<SPECIAL_{i}>" for i in range(num_special)]
    for i, name in enumerate(("<unk>", "<s>", END)):
        names[i] = name
    for entry in content.get("special_tokens") or ():
        names[entry["rank"]] = entry["token_str"]
    characters = _byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocab = {name: i for i, name in enumerate(names)}
    vocab |= {written(token): num_special + i for i, token in enumerate(ranked)}
    merges = [(written(left), written(right)) for left, right in _merges(ranked)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def _merges(ranked: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The pairs of tokens whose join is a token, in the order in which they may be merged."""
    rank = {token: i for i, token in enumerate(ranked)}
    found = []
    for token in ranked:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in rank and pair[1] in rank]
        found += sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return found


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]
