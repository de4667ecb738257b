"""Writing a corpus: documents in their final order, from the parts that tokenizing left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.shards import describe_file, token_dtype, write_documents

_OPEN_PARTS = 1024  # systems limit how many files a process maps


class PartReader:
    """The tokens of a document by its id; `located` says where each is (`Corpus.tokenize`)."""

    def __init__(self, located: pa.Table, folder: Path, vocab_size: int) -> None:
        order = np.argsort(located["id"].to_numpy())
        part = located["part"].combine_chunks().dictionary_encode()
        self.vocab_size = vocab_size
        self._ids = located["id"].to_numpy()[order]
        self._starts = located["start"].to_numpy()[order]
        self._counts = located["count"].to_numpy()[order]
        self._parts = part.indices.to_numpy()[order]
        self._names = part.dictionary.to_pylist()
        self._map = lru_cache(_OPEN_PARTS)(
            lambda name: np.memmap(folder / name, dtype=token_dtype(vocab_size), mode="r")
        )

    def read(self, id_: int) -> NDArray[np.unsignedinteger]:
        row = np.searchsorted(self._ids, id_)
        assert self._ids[row] == id_
        tokens = self._map(self._names[self._parts[row]])
        return tokens[self._starts[row] : self._starts[row] + self._counts[row]]


class CorpusWriter:
    """Writes the files of `pipeline.data.shards` and describes them for the manifest."""

    def __init__(self, folder: Path, reader: PartReader, shard_tokens: int) -> None:
        self.folder = folder
        self.reader = reader
        self.shard_tokens = shard_tokens
        (folder / "holdout").mkdir()

    def write_training(self, name: str, ids: Sequence[int]) -> list[dict[str, Any]]:
        """A source's documents in shards of at most `shard_tokens`, or of one longer document."""
        written: list[dict[str, Any]] = []
        documents = (self.reader.read(id_) for id_ in ids)
        following = next(documents, None)

        def one_shard() -> Iterator[NDArray[np.unsignedinteger]]:
            nonlocal following
            size = 0
            while following is not None:
                if size and size + len(following) > self.shard_tokens:
                    return
                yield following
                size += len(following)
                following = next(documents, None)

        while following is not None:
            stem = f"{name}-{len(written):05}"
            written.append(write_documents(self.folder, stem, one_shard(), self.reader.vocab_size))
        return written

    def write_holdout(
        self,
        name: str,
        texts: Sequence[str],
        tokens: Sequence[NDArray[Any]],
        reserved: Sequence[str],
    ) -> dict[str, Any]:
        """The held-out token stream, and the texts of it and of the reserved documents."""
        stem = f"holdout/{name}"
        entry = write_documents(self.folder, stem, tokens, self.reader.vocab_size)
        lines = [{"text": text, "reserved": False} for text in texts]
        lines += [{"text": text, "reserved": True} for text in reserved]
        with (self.folder / f"{stem}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        return {
            **entry,
            "bytes": sum(len(text.encode()) for text in texts),
            "reserved_documents": len(reserved),
            "texts": describe_file(self.folder, f"{stem}.jsonl"),
        }
