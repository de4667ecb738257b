"""Small corpora for the tests: written without Ray, or as files for `prepare` to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import DataConfig, SourceConfig, TokenizerConfig
from pipeline.data import shards
from pipeline.data.tokenizer import TOKENIZER_FILE, train_tokenizer

VOCAB_SIZE = 300
EOS = 0


def document(first: int, length: int) -> np.ndarray:
    """`length` ids that count up from `first` within 1..VOCAB_SIZE-1, then EOS."""
    return np.append((first + np.arange(length)) % (VOCAB_SIZE - 1) + 1, EOS)


def write_corpus(
    folder: Path,
    sources: Mapping[str, Sequence[np.ndarray]],
    holdout: Sequence[np.ndarray] = (),
    documents_per_shard: int = 3,
) -> Path:
    """A prepared corpus of given tokens, as `pipeline.data.build` would lay it out."""
    (folder / "holdout").mkdir(parents=True)
    config = TokenizerConfig(vocab_size=VOCAB_SIZE)
    train_tokenizer(["words that repeat words that repeat"] * 9, config).save(
        str(folder / TOKENIZER_FILE)
    )
    entries: dict[str, Any] = {}
    for name, documents in sources.items():
        files = [
            shards.write_documents(
                folder, f"{name}-{i:05}", documents[i : i + documents_per_shard], VOCAB_SIZE
            )
            for i in range(0, len(documents), documents_per_shard)
        ]
        (folder / f"holdout/{name}.jsonl").write_text("")
        entries[name] = {
            "documents": len(documents),
            "bytes": 4 * sum(len(document) for document in documents),
            "tokens": sum(file["tokens"] for file in files),
            "shards": files,
            "holdout": {
                **shards.write_documents(folder, f"holdout/{name}", holdout, VOCAB_SIZE),
                "texts": shards.describe_file(folder, f"holdout/{name}.jsonl"),
            },
        }
    tokenizer = shards.describe_file(folder, TOKENIZER_FILE)
    manifest = {
        "format": shards.FORMAT,
        "version": shards.FORMAT_VERSION,
        "tokenizer": {**tokenizer, "vocab_size": VOCAB_SIZE, "eos_id": EOS},
        "sources": entries,
    }
    manifest["content_hash"] = shards.content_hash(manifest)
    (folder / shards.MANIFEST).write_text(json.dumps(manifest))
    return folder


def configuration(sources: Mapping[str, SourceConfig], **changes: Any) -> DataConfig:
    """A small configuration that holds a tenth out and cuts shards at 2000 tokens."""
    tokenizer = changes.pop("tokenizer", TokenizerConfig(vocab_size=400, training_bytes=20_000))
    settings = {"holdout_fraction": 0.1, "shard_tokens": 2_000, **changes}
    return DataConfig("test", dict(sources), tokenizer, **settings)


def write_texts(folder: Path, texts: Sequence[str | bytes], ending: str = ".txt") -> Path:
    """One file for each text."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        raw = text.encode() if isinstance(text, str) else text
        (folder / f"{i:04}{ending}").write_bytes(raw)
    return folder


def sentences(count: int, topic: str) -> list[str]:
    """Distinct short documents."""
    return [
        f"{topic} number {i}: " + " ".join(f"word{(i * j) % 97}" for j in range(20)) + ".\n"
        for i in range(count)
    ]
