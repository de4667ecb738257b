"""Building a corpus: read, select, train the tokenizer, tokenize, write shards.

Ray Data reads and tokenizes in parallel; the driver decides and writes. All that decides is a
function of the documents' content hashes, so that workers, blocks and their timing leave no trace:
the same sources give the same content hash. The driver holds some 100 bytes a document, and no text
but the tokenizer's sample and the held-out documents.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline.config import ConfigError, DataConfig, digest
from pipeline.data import shards
from pipeline.data.document import DOCUMENT, NO_DOCUMENT
from pipeline.data.ray_jobs import Corpus, quiet_ray_data
from pipeline.data.selection import Documents, Rows, Selection, select, tokenizer_sample
from pipeline.data.sources import SOURCE_SHIFT, identity, read_tasks
from pipeline.data.tokenizer import (
    TOKENIZER_FILE,
    encode_documents,
    load_tokenizer,
    train_tokenizer,
    vocab_size_of,
)
from pipeline.data.writer import CorpusWriter, PartReader
from pipeline.ray_session import ray_session

_PARTS = "parts"  # tokens in the order in which they came, until the shards are written


def build(
    data: DataConfig, folder: Path, progress: Callable[[str], None], address: str | None = None
) -> None:
    """Fill an empty folder with the corpus, its manifest last. Raises `ConfigError`."""
    laps = _Laps()
    parts = folder / _PARTS
    parts.mkdir()
    with ray_session(address), quiet_ray_data():
        laps.end("start Ray")
        progress(f"data: reading {', '.join(data.sources)}")
        corpus = Corpus(read_tasks(data))
        documents, items = _describe(corpus.index, len(data.sources))
        laps.end("read")
        selection = select(documents, data)
        _check_selection(data, selection, items, progress)
        _check_disk(documents, selection, folder)

        sample_bytes = 0 if data.tokenizer.path else data.tokenizer.training_bytes
        sample = tokenizer_sample(documents, selection.training, sample_bytes)
        fetched = np.concatenate([*sample, *selection.holdout, *selection.reserved])
        texts = corpus.texts(documents.id_N[fetched])
        laps.end("fetch")
        tokenizer = _make_tokenizer(data, _texts(documents, np.concatenate(sample), texts), folder)
        laps.end("tokenizer")
        eos_id = tokenizer.token_to_id(data.tokenizer.eos_token)
        assert eos_id is not None
        vocab_size = vocab_size_of(tokenizer)
        training = documents.id_N[np.concatenate(selection.training)]
        progress(f"data: tokenizing {len(training):,} documents with {vocab_size:,} ids")
        located = corpus.tokenize(training, folder / TOKENIZER_FILE, eos_id, vocab_size, parts)
        laps.end("tokenize")

    writer = CorpusWriter(folder, PartReader(located, parts, vocab_size), data.shard_tokens)
    sources = {}
    for number, name in enumerate(data.sources):
        rows = selection.training[number]
        written = writer.write_training(name, documents.id_N[rows].tolist())
        held_out = _texts(documents, selection.holdout[number], texts)
        sources[name] = {
            "documents": len(rows),
            "bytes": int(documents.bytes_N[rows].sum()),
            "tokens": sum(shard["tokens"] for shard in written),
            "counts": items[number] | selection.counts[number],
            "shards": written,
            "holdout": writer.write_holdout(
                name,
                held_out,
                encode_documents(tokenizer, held_out, eos_id),
                _texts(documents, selection.reserved[number], texts),
            ),
        }
    shutil.rmtree(parts)
    laps.end("write shards")
    manifest = {
        "format": shards.FORMAT,
        "version": shards.FORMAT_VERSION,
        "tokenizer": {
            **shards.describe_file(folder, TOKENIZER_FILE),
            "vocab_size": vocab_size,
            "eos_token": data.tokenizer.eos_token,
            "eos_id": eos_id,
        },
        "sources": sources,
    }
    manifest["content_hash"] = shards.content_hash(manifest)
    manifest["made_by"] = _made_by(data, laps)
    (folder / shards.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for line in _summary(manifest):
        progress(line)


def _describe(index: pa.Table, num_sources: int) -> tuple[Documents, list[dict[str, int]]]:
    """The documents of the index, and for each source how many items were read and of what kind."""
    items = []
    source = pa.array(index["id"].to_numpy() >> SOURCE_SHIFT)
    for number in range(num_sources):
        statuses = index["status"].filter(pc.equal(source, number))
        found = {entry["values"]: entry["counts"] for entry in statuses.value_counts().to_pylist()}
        items.append({"read": len(statuses), **{kind: found.get(kind, 0) for kind in NO_DOCUMENT}})
    kept = index.filter(pc.equal(index["status"], DOCUMENT)).combine_chunks()
    documents = Documents(
        id_N=kept["id"].to_numpy(),
        source_N=kept["id"].to_numpy() >> SOURCE_SHIFT,
        hash_N4=_hash_words(kept["sha256"]),
        bytes_N=kept["bytes"].to_numpy(),
        reserved_N=kept["reserved"].to_numpy(zero_copy_only=False),
    )
    return documents, items


def _hash_words(hashes: pa.ChunkedArray) -> NDArray[np.uint64]:
    """SHA-256 digests as four big-endian words each [N, 4]."""
    words = [np.empty(0, dtype=">u8")]
    for chunk in hashes.chunks:
        start, count = 32 * chunk.offset, 4 * len(chunk)
        words.append(np.frombuffer(chunk.buffers()[1], dtype=">u8", count=count, offset=start))
    return np.concatenate(words).reshape(-1, 4).astype(np.uint64)


def _check_selection(
    data: DataConfig,
    selection: Selection,
    items: list[dict[str, int]],
    progress: Callable[[str], None],
) -> None:
    for number, name in enumerate(data.sources):
        counts = items[number] | selection.counts[number]
        if not len(selection.training[number]):
            shown = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
            raise ConfigError(f"data.sources.{name}: no document is left to train on ({shown})")
        if not len(selection.holdout[number]):
            progress(
                f"data: source {name} has no held-out document, so its loss will not be measured; "
                f"data.holdout_fraction={data.holdout_fraction} is small for "
                f"{len(selection.training[number])} documents"
            )


def _check_disk(documents: Documents, selection: Selection, folder: Path) -> None:
    """There is room for the tokens twice (parts, then shards) at two bytes of text a token."""
    text = int(documents.bytes_N[np.concatenate(selection.training)].sum())
    needed = 2 * text + (16 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"root: preparing {text / 1e6:,.0f} MB of text needs about {needed / 1e6:,.0f} MB, and "
            f"{folder.parent} has {free / 1e6:,.0f} MB free; make room, or choose another root=..."
        )


def _texts(documents: Documents, rows: Rows, texts: dict[int, str]) -> list[str]:
    return [texts[id_] for id_ in documents.id_N[rows].tolist()]


def _make_tokenizer(data: DataConfig, sample: list[str], folder: Path) -> Tokenizer:
    """The configured tokenizer, or one trained on the sample; a copy of it goes into the folder."""
    path = folder / TOKENIZER_FILE
    if data.tokenizer.path is None:
        train_tokenizer(sample, data.tokenizer).save(str(path))
    else:
        shutil.copyfile(data.tokenizer.path, path)
    return load_tokenizer(path)


class _Laps:
    """Seconds that each step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] = round(now - self._last, 2)
        self._last = now


def _made_by(data: DataConfig, laps: _Laps) -> dict[str, Any]:
    """How, when and with what: tells where a corpus came from, and enters no hash."""
    return {
        "command": sys.argv,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("ray", "tokenizers", "pyarrow", "numpy")},
        "seconds": laps.seconds,
        "config": dataclasses.asdict(data),
        "inputs": digest(identity(data)),
    }


def _summary(manifest: dict[str, Any]) -> Iterator[str]:
    yield "data: source        documents        bytes       tokens  bytes/token  held out  left out"
    for name, entry in manifest["sources"].items():
        left_out = sum(
            entry["counts"][kind] for kind in (*NO_DOCUMENT, "duplicate", "over_max_bytes")
        )
        yield (
            f"data: {name:12} {entry['documents']:>10,} {entry['bytes']:>12,} "
            f"{entry['tokens']:>12,} {entry['bytes'] / entry['tokens']:>12.2f} "
            f"{entry['holdout']['documents']:>9,} {left_out:>9,}"
        )
    steps = ", ".join(
        f"{step} {took:.1f} s" for step, took in manifest["made_by"]["seconds"].items()
    )
    yield f"data: {steps}"
