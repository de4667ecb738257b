"""Building a corpus: read, select, make the tokenizer, tokenize, write shards.

Ray Data runs the passes over the text (`ray_jobs`); the driver decides. All that decides is a
function of the documents' content hashes, so that workers, blocks and their timing leave no trace:
the same sources give the same content hash. The driver holds some 100 bytes a document, and no text
but the tokenizer's sample and the held-out documents.

Whatever is done leaves a file, so that the same call after an interruption goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
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
from pipeline.data import reuse, shards
from pipeline.data.document import DOCUMENT, NO_DOCUMENT
from pipeline.data.files import whole_file
from pipeline.data.packing import lay_out
from pipeline.data.ray_jobs import Corpus, quiet_ray_data, run_tasks
from pipeline.data.selection import Documents, Rows, Selection, select, tokenizer_sample
from pipeline.data.sources import SOURCE_SHIFT, identity, read_evaluations, read_tasks
from pipeline.data.tokenizer import (
    TOKENIZER_FILE,
    encode_documents,
    load_tokenizer,
    tokenizer_json,
    train_tokenizer,
    vocab_size_of,
)
from pipeline.data.writer import Located, plan_shards, write_holdout, write_shard
from pipeline.ray_session import ray_session

INDEX = ".index"  # beside the corpora: what was read of each input file


def build(
    data: DataConfig, folder: Path, progress: Callable[[str], None], address: str | None = None
) -> None:
    """Fill a folder with the corpus, its manifest last; one that an interrupted call left is
    completed. Raises `ConfigError`, and `OSError` for a full disk."""
    laps = _Laps()
    with ray_session(address), quiet_ray_data():
        laps.end("start Ray")
        corpus = Corpus(read_tasks(data), read_evaluations(data), folder.parent / INDEX, folder)
        progress(f"data: reading {', '.join(data.sources)}")
        tasks_read = corpus.read()
        progress(f"data: read {tasks_read} of {len(corpus.tasks)} parts, the others are known")
        documents, items = _describe(corpus.items(), len(data.sources))
        laps.end("read")
        selection = select(documents, data)
        _check_selection(data, selection, items, progress)
        tokenizer = _tokenizer(data, corpus, documents, selection)
        laps.end("tokenizer")
        entries = _Sources(data, corpus, tokenizer, documents, selection, progress).make(laps)
    for number, (name, entry) in enumerate(entries.items()):
        rows = selection.training[number]
        entries[name] = {
            "documents": len(rows),
            "bytes": int(documents.bytes_N[rows].sum()),
            "tokens": sum(shard["tokens"] for shard in entry["shards"]),
            "counts": items[number] | selection.counts[number],
            **entry,
        }
    manifest = {
        "format": shards.FORMAT,
        "version": shards.FORMAT_VERSION,
        "tokenizer": {
            **shards.describe_file(folder, TOKENIZER_FILE),
            "vocab_size": vocab_size_of(tokenizer),
            "eos_token": data.tokenizer.eos_token,
            "eos_id": tokenizer.token_to_id(data.tokenizer.eos_token),
            "bos_token": data.tokenizer.bos_token,
        },
        "packing": data.packing,
        "sources": entries,
    }
    manifest["content_hash"] = shards.content_hash(manifest)
    manifest["made_by"] = _made_by(data, laps, tasks_read)
    with whole_file(folder / shards.MANIFEST) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    for name in ("text", "parts"):
        shutil.rmtree(folder / name, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _Sources:
    """Makes the files of all sources, or finds them in another corpus."""

    data: DataConfig
    corpus: Corpus
    tokenizer: Tokenizer
    documents: Documents
    selection: Selection
    progress: Callable[[str], None]

    def make(self, laps: _Laps) -> dict[str, dict[str, Any]]:
        """For each source its `made_of`, `shards` and `holdout`."""
        corpora, work = self.corpus.work.parent, self.corpus.work
        fingerprint = shards.file_sha256(work / TOKENIZER_FILE)
        entries: dict[str, dict[str, Any]] = {}
        missing = []
        for number, name in enumerate(self.data.sources):
            key = reuse.made_of(self.data, fingerprint, self.documents, self.selection, number)
            entries[name] = {"made_of": key}
            found = reuse.reusable(corpora, name, key)
            if found is None:
                missing.append(number)
                continue
            reuse.link_files(found[1], found[0], work)
            entries[name] |= {part: found[1][part] for part in ("shards", "holdout")}
            self.progress(f"data: {name} is as in {found[0].name}, whose shards are linked")
        if missing:
            self._write(missing, entries, laps)
        return entries

    def _write(self, numbers: list[int], entries: dict[str, dict[str, Any]], laps: _Laps) -> None:
        data, documents, chosen = self.data, self.documents, self.selection
        _check_disk(documents, [chosen.training[n] for n in numbers], self.corpus.work)
        training = documents.id_N[np.concatenate([chosen.training[n] for n in numbers])]
        eos_id, bos_id = (
            self.tokenizer.token_to_id(token) if token else None
            for token in (data.tokenizer.eos_token, data.tokenizer.bos_token)
        )
        assert eos_id is not None
        vocab_size = vocab_size_of(self.tokenizer)
        self.progress(f"data: tokenizing {len(training):,} documents with {vocab_size:,} ids")
        parts, located = self.corpus.tokenize(training, vocab_size, eos_id, bos_id)
        laps.end("tokenize")
        written = self._write_shards(numbers, parts, located, (vocab_size, eos_id))
        apart = [rows[n] for n in numbers for rows in (chosen.holdout, chosen.reserved)]
        texts = dict(self.corpus.texts(documents.id_N[np.concatenate(apart)]))
        for number in numbers:
            name = list(data.sources)[number]
            held_out = _texts(documents, chosen.holdout[number], texts)
            tokens = encode_documents(self.tokenizer, held_out, eos_id, bos_id)
            reserved = _texts(documents, chosen.reserved[number], texts)
            entries[name]["shards"] = written[number]
            entries[name]["holdout"] = write_holdout(
                self.corpus.work, name, held_out, tokens, reserved, vocab_size
            )
        laps.end("write shards")

    def _write_shards(
        self, numbers: list[int], parts: list[str], located: pa.Table, ids: tuple[int, int]
    ) -> dict[int, list[dict[str, Any]]]:
        """For each source the entries of its shards, written by Ray unless they are there."""
        data, work = self.data, self.corpus.work
        order = np.argsort(located["id"].to_numpy())
        sorted_ids = located["id"].to_numpy()[order]
        columns = [located[name].to_numpy()[order] for name in ("part", "start", "count")]
        stems: dict[int, list[str]] = {}
        for number in numbers:
            wanted = self.documents.id_N[self.selection.training[number]]
            places = np.searchsorted(sorted_ids, wanted)
            assert (sorted_ids[places] == wanted).all()
            where = Located(*(column[places] for column in columns))
            layout = lay_out(where.count_D, data.packing, data.row_length)
            plans = plan_shards(where, layout, data.shard_tokens)
            name = list(data.sources)[number]
            stems[number] = [f"{name}-{shard:05}" for shard in range(len(plans))]
            for stem, plan in zip(stems[number], plans, strict=True):
                with whole_file(work / "parts" / f"{stem}.npy") as file:
                    np.save(file, plan)
        flat = [stem for several in stems.values() for stem in several]
        folder = work / "parts"

        def write(number: int) -> None:
            write_shard(folder / f"{flat[number]}.npy", parts, folder, work, flat[number], ids)

        waiting = [i for i, stem in enumerate(flat) if not (folder / f"{stem}.json").is_file()]
        run_tasks(write, waiting)
        return {
            number: [json.loads((folder / f"{stem}.json").read_bytes()) for stem in several]
            for number, several in stems.items()
        }


def _tokenizer(
    data: DataConfig, corpus: Corpus, documents: Documents, selection: Selection
) -> Tokenizer:
    """The configured tokenizer, or one trained on the sample; a copy of it goes into the folder."""
    path = corpus.work / TOKENIZER_FILE
    if not path.is_file():
        if data.tokenizer.path is None:
            size = data.tokenizer.training_bytes
            sample = np.concatenate(tokenizer_sample(documents, selection.training, size))
            texts = (text for _, text in corpus.texts(documents.id_N[sample]))
            trained = train_tokenizer(texts, data.tokenizer)
            content = trained.to_str(pretty=True)
        else:
            content = tokenizer_json(data.tokenizer.path)
        with whole_file(path) as file:
            file.write(content.encode())
    return load_tokenizer(path)


def _describe(
    index: Iterable[tuple[int, pa.RecordBatch]], num_sources: int
) -> tuple[Documents, list[dict[str, int]]]:
    """The documents of the index, and for each source how many items were read and of what kind."""
    items = [{"read": 0, **dict.fromkeys(NO_DOCUMENT, 0)} for _ in range(num_sources)]
    batches = []
    for source, batch in index:
        items[source]["read"] += len(batch)
        for kind, count in Counter(batch["status"].to_pylist()).items():
            if kind != DOCUMENT:
                items[source][kind] += count
        batches.append(batch.filter(pc.equal(batch["status"], DOCUMENT)).drop_columns("status"))
    if not batches:
        raise ConfigError("data.sources: no file holds a row")
    kept = pa.Table.from_batches(batches)
    id_N = kept["id"].to_numpy()
    documents = Documents(
        id_N=id_N,
        source_N=(id_N >> SOURCE_SHIFT).astype(np.int8),
        hash_N4=_hash_words(kept["sha256"]),
        bytes_N=kept["bytes"].to_numpy(),
        reserved_N=kept["reserved"].to_numpy(),
    )
    return documents, items


def _hash_words(hashes: pa.ChunkedArray) -> NDArray[np.uint64]:
    """SHA-256 digests as four big-endian words each [N, 4]."""
    words, filled = np.empty((len(hashes), 4), np.uint64), 0
    for chunk in hashes.chunks:
        start, count = 32 * chunk.offset, 4 * len(chunk)
        found = np.frombuffer(chunk.buffers()[1], dtype=">u8", count=count, offset=start)
        words[filled : filled + len(chunk)] = found.reshape(-1, 4)
        filled += len(chunk)
    return words


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


def _check_disk(documents: Documents, training: list[Rows], folder: Path) -> None:
    """There is room for the tokens twice (parts, then shards) at two bytes of text a token."""
    text = int(documents.bytes_N[np.concatenate(training)].sum())
    needed = 2 * text + (16 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"root: preparing {text / 1e6:,.0f} MB of text needs about {needed / 1e6:,.0f} MB, and "
            f"{folder.parent} has {free / 1e6:,.0f} MB free; make room, or choose another root=..."
        )


def _texts(documents: Documents, rows: Rows, texts: dict[int, str]) -> list[str]:
    return [texts[id_] for id_ in documents.id_N[rows].tolist()]


class _Laps:
    """Seconds that each step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] = round(now - self._last, 2)
        self._last = now


def _made_by(data: DataConfig, laps: _Laps, tasks_read: int) -> dict[str, Any]:
    """How, when and with what: tells where a corpus came from, and enters no hash."""
    return {
        "command": sys.argv,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("ray", "tokenizers", "pyarrow", "numpy")},
        "seconds": laps.seconds,
        "parts_read": tasks_read,
        "row_length": data.row_length,
        "config": dataclasses.asdict(data),
        "inputs": digest(identity(data)),
        "files": identity(data),
    }
