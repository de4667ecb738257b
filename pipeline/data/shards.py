"""Prepared corpora on disk: token shards, held-out documents, the tokenizer and their manifest.

    <name>-<hash>/
      manifest.json               format version, counts, checksums, content hash
      tokenizer.json
      <source>-00000.tokens       token ids, little-endian uint16 (uint32 above 65536 ids)
      <source>-00000.sums         uint64: a sum for each 512 bytes of it, checked in reading
      <source>-00000.offsets      uint64: where each document starts, then the number of tokens
      holdout/<source>.tokens, .sums, .offsets     documents never trained on, in the same form
      holdout/<source>.jsonl                their texts: {"text": ..., "reserved": ...}

Every document ends with one end-of-document token. A source is one stream of tokens over its
shards; unit r of length L is tokens r*L .. (r+1)*L, with one more token read as the last label.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DataConfig, digest, nearest
from pipeline.data.blocks import (
    REMEDY,
    DamagedShardError,
    DataError,
    LocalFiles,
    RemoteFiles,
    write_sums,
)
from pipeline.data.tokenizer import TOKENIZER_FILE, load_tokenizer, read_token_bytes

FORMAT = "token-shards"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"


class Dataset:
    """A prepared corpus. Safe to read from several threads.

    `shards_uri` is the address of a copy of the shards that is read by range; None maps the
    folder's own into memory.
    """

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], shards_uri: str | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shards_uri = shards_uri
        self.tokenizer_path = folder / TOKENIZER_FILE
        self.eos_id: int = manifest["tokenizer"]["eos_id"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.dtype = token_dtype(self.vocab_size)
        self.local = LocalFiles(folder, self.dtype)
        self.files = RemoteFiles(shards_uri, self.dtype) if shards_uri else self.local

    @classmethod
    def open(
        cls, folder: Path | str, shards_uri: str | None = None, *, check_shards: bool = True
    ) -> Dataset:
        """Read the manifest, and check that every file has its size and the tokenizer its hash.

        check_shards: the shards' sizes as well; without, a bad one is found when it is read.
        Raises `DataError`.
        """
        dataset = cls(Path(folder), read_manifest(Path(folder)), shards_uri)
        verify(dataset, check_shards=check_shards and not shards_uri)
        return dataset

    @property
    def place(self) -> str:
        """Where the shards lie."""
        return self.shards_uri or str(self.folder)

    @property
    def content_hash(self) -> str:
        """SHA-256 of tokenizer, shards and held-out documents: equal hash, equal training data."""
        return self.manifest["content_hash"]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, in the configuration's order."""
        return tuple(self.manifest["sources"])

    @cached_property
    def bos_id(self) -> int | None:
        """The token that begins each document, where the corpus was prepared with one."""
        token = self.manifest["tokenizer"].get("bos_token")
        return load_tokenizer(self.tokenizer_path).token_to_id(token) if token else None

    def num_tokens(self, source: str) -> int:
        """Tokens of the training part, end-of-document tokens included."""
        return self._source(source)["tokens"]

    def num_units(self, source: str, unit_length: int) -> int:
        """Whole units in the source; the last one's last label needs a token after it."""
        return max(0, self.num_tokens(source) - 1) // unit_length

    def read(self, source: str, start: int, count: int) -> NDArray[np.unsignedinteger]:
        """`count` consecutive tokens of a source's stream from `start` on, across shards."""
        if not 0 <= start <= start + count <= self.num_tokens(source):
            raise ValueError(
                f"source {source} has {self.num_tokens(source)} tokens; "
                f"{start}..{start + count} reaches outside"
            )
        borders, shards = self._borders[source], self._source(source)["shards"]
        out = np.empty(count, dtype=self.dtype)
        filled = 0
        shard = int(np.searchsorted(borders, start, side="right")) - 1
        while filled < count:
            begin = start + filled - int(borders[shard])
            part = min(count - filled, shards[shard]["tokens"] - begin)
            out[filled : filled + part] = self.files.read(shards[shard], begin, part)
            filled, shard = filled + part, shard + 1
        return out

    def read_intact(
        self, source: str, count: int
    ) -> tuple[NDArray[np.unsignedinteger], list[DamagedShardError]]:
        """The first `count` tokens of a source's stream, passing over damaged shards; and these."""
        found, damaged = [np.empty(0, self.dtype)], []
        for shard in self._source(source)["shards"]:
            try:
                found.append(self.files.read(shard, 0, min(count, shard["tokens"])))
            except DamagedShardError as error:
                damaged.append(error)
                continue
            count -= len(found[-1])
            if not count:
                break
        return np.concatenate(found), damaged

    def read_units(
        self,
        names: Sequence[str],
        source_U: NDArray[np.int64],
        row_U: NDArray[np.int64],
        unit_length: int,
        out: NDArray[np.unsignedinteger] | None = None,
    ) -> tuple[NDArray[np.unsignedinteger], dict[int, str]]:
        """Units of several sources [U, unit_length + 1], each with the token after it.

        source_U: places in `names`. out: memory for so many units, or more, that is used again.
        The second value names, for each unit that cannot be had, the shard found damaged; such a
        unit is filled with end-of-document tokens.
        """
        from kernels import cpu  # imports torch, which most users of a corpus do without

        if out is None:
            out = np.empty((len(row_U), unit_length + 1), self.dtype)
        tokens_UT = out[: len(row_U)]
        intact_U = np.zeros(len(row_U), np.bool_)
        if self.files is self.local and cpu.available():
            place_U4, files = self._places(names, source_U, row_U, unit_length)
            intact_U = cpu.read_ranges(place_U4, tokens_UT)
            del files  # until here they stayed mapped
        damaged: dict[int, str] = {}

        def read_alone(unit: int) -> None:
            name, start = names[source_U[unit]], int(row_U[unit]) * unit_length
            try:
                tokens_UT[unit] = self.read(name, start, unit_length + 1)
            except DamagedShardError as error:
                damaged[unit] = error.file

        list(self.files.map(read_alone, np.flatnonzero(~intact_U).tolist()))
        tokens_UT[list(damaged)] = self.eos_id
        return tokens_UT, damaged

    def _places(
        self,
        names: Sequence[str],
        source_U: NDArray[np.int64],
        row_U: NDArray[np.int64],
        unit_length: int,
    ) -> tuple[NDArray[np.int64], list[Any]]:
        """Where units lie in this machine's memory, for `kernels.cpu.read_ranges` [U, 4], and what
        has to be kept for so long. Zeros for a unit across two shards, or of a damaged one."""
        place_U4, files = np.zeros((len(row_U), 4), np.int64), []
        for number in np.unique(source_U):
            unit_K = np.flatnonzero(source_U == number)
            start_K, borders = row_U[unit_K] * unit_length, self._borders[names[number]]
            shard_K = np.searchsorted(borders, start_K, side="right") - 1
            shards = self._source(names[number])["shards"]
            needed, number_K = np.unique(shard_K, return_inverse=True)
            table = np.zeros((len(needed), 3), np.int64)
            for row, shard in zip(table, needed, strict=True):
                with contextlib.suppress(DamagedShardError):
                    raw, sums = self.local.mapped(shards[shard])
                    row[:] = raw.ctypes.data, raw.nbytes, sums.ctypes.data
                    files += [raw, sums]
            within_K = start_K + unit_length < borders[shard_K + 1]
            place_U4[unit_K, :3] = table[number_K] * within_K[:, None]
            place_U4[unit_K, 3] = (start_K - borders[shard_K]) * self.dtype.itemsize
        return place_U4, files

    def shards_of(self, source: str, start: int, count: int) -> list[str]:
        """Names of the shards that hold tokens start .. start + count - 1 of a source's stream."""
        borders = self._borders[source]
        first = int(np.searchsorted(borders, start, side="right")) - 1
        last = int(np.searchsorted(borders, start + count - 1, side="right")) - 1
        return [shard["file"] for shard in self._source(source)["shards"][first : last + 1]]

    def shards_of_unit(self, source: str, row: int, unit_length: int) -> list[str]:
        """Names of the shards that a unit, with the token after it, lies in."""
        return self.shards_of(source, row * unit_length, unit_length + 1)

    def documents_of(self, source: str, start: int, count: int) -> list[tuple[int, int, int]]:
        """The documents that tokens start .. start + count - 1 of a source's stream belong to.

        Each as (number within the source, first token, end) in the stream. Reads the offsets of the
        shards concerned.
        """
        borders, shards = self._borders[source], self._source(source)["shards"]
        first = int(np.searchsorted(borders, start, side="right")) - 1
        last = int(np.searchsorted(borders, start + count - 1, side="right")) - 1
        found = []
        for shard in range(first, last + 1):
            before = sum(entry["documents"] for entry in shards[:shard])
            file = self.folder / shards[shard]["offsets"]["file"]
            try:
                offsets = np.fromfile(file, "<u8").astype(np.int64) + borders[shard]
            except OSError as error:
                raise DataError(f"{file}: cannot be read ({error}); {REMEDY}") from error
            low = max(int(np.searchsorted(offsets, start, side="right")) - 1, 0)
            high = int(np.searchsorted(offsets[:-1], start + count, side="left"))
            found += [
                (before + number, int(offsets[number]), int(offsets[number + 1]))
                for number in range(low, high)
            ]
        return found

    def holdout(self, source: str) -> NDArray[np.unsignedinteger]:
        """The held-out token stream: documents chosen by hash. Reserved ones are not in it."""
        entry = self._source(source)["holdout"]
        return self.local.read(entry, 0, entry["tokens"])

    def holdout_documents(self, source: str) -> list[dict[str, Any]]:
        """Held-out documents as {"text": str, "reserved": bool}: the stream's, then reserved ones.

        A reserved document is of a kind that no training document is.
        """
        path = self.folder / self._source(source)["holdout"]["texts"]["file"]
        with path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def token_bytes(self) -> NDArray[np.int64]:
        """Bytes of text that each id stands for [vocab_size]; 0 for special tokens."""
        return read_token_bytes(self.tokenizer_path)

    @property
    def shard_names(self) -> set[str]:
        """File names of all training shards."""
        entries = self.manifest["sources"].values()
        return {shard["file"] for entry in entries for shard in entry["shards"]}

    @cached_property
    def _borders(self) -> dict[str, NDArray[np.int64]]:
        """For each source, where in its stream each shard starts, and the stream's end."""
        return {
            name: np.cumsum([0, *(shard["tokens"] for shard in entry["shards"])])
            for name, entry in self.manifest["sources"].items()
        }

    def _source(self, source: str) -> dict[str, Any]:
        entries = self.manifest["sources"]
        if source not in entries:
            raise DataError(f"{self.folder}: no source {source!r}; {nearest(source, entries)}")
        return entries[source]


def open_corpus(data: DataConfig, folder: Path) -> Dataset:
    """The corpus in a folder as a run is configured to read it. Raises `DataError`."""
    return Dataset.open(folder, data.shards_uri, check_shards=data.on_corrupt == "stop")


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The type that ids are stored in."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """A prepared corpus's manifest. Raises `DataError` if absent, damaged or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: missing, so this is no prepared corpus; {REMEDY}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: unreadable ({error}); {REMEDY}") from None
    if not isinstance(manifest, dict):
        raise DataError(f"{path}: is no manifest of a corpus; {REMEDY}")
    found = (manifest.get("format"), manifest.get("version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise DataError(
            f"{path}: the format is {found}, this program reads {(FORMAT, FORMAT_VERSION)}; "
            "prepare the corpus again, or use the program that wrote it"
        )
    if manifest.get("content_hash") != content_hash(manifest):
        raise DataError(f"{path}: does not match its own content hash; {REMEDY}")
    return manifest


def content_hash(manifest: Mapping[str, Any]) -> str:
    """Hash of what the corpus is, leaving out how, when and by whom it was made."""
    return digest(
        {key: value for key, value in manifest.items() if key not in ("content_hash", "made_by")}
    )


def verify(dataset: Dataset, deep: bool = False, *, check_shards: bool = True) -> None:
    """Check every file's size, and with `deep` its SHA-256. Raises `DataError`.

    check_shards: the training shards as well as the rest.
    """
    for entry in _files(dataset.manifest, check_shards):
        path = dataset.folder / entry["file"]
        try:
            size = path.stat().st_size
        except OSError:
            raise DataError(f"{path}: missing; {REMEDY}") from None
        if size != entry["size"]:
            raise DataError(f"{path}: has {size} bytes, not {entry['size']}; {REMEDY}")
        hashed = deep or path == dataset.tokenizer_path
        if hashed and file_sha256(path) != entry["sha256"]:
            raise DataError(f"{path}: damaged, its SHA-256 differs from the manifest's; {REMEDY}")


def write_documents(
    folder: Path, stem: str, documents: Iterable[np.ndarray], vocab_size: int
) -> dict[str, Any]:
    """Write a shard's three files from documents that end with EOS; its entry in the manifest.

    File names in it are relative to `folder`.
    """
    offsets, total = [0], 0
    first: int | None = None
    last: int | None = None
    with (folder / f"{stem}.tokens").open("wb") as file:
        for document in documents:
            ids = np.asarray(document, dtype=token_dtype(vocab_size))
            file.write(ids.tobytes())
            total += len(ids)
            offsets.append(total)
            first, last = int(ids[0]) if first is None else first, int(ids[-1])
    (folder / f"{stem}.offsets").write_bytes(np.asarray(offsets, dtype="<u8").tobytes())
    write_sums(folder / f"{stem}.tokens", folder / f"{stem}.sums")
    return {
        **describe_file(folder, f"{stem}.tokens"),
        "tokens": total,
        "documents": len(offsets) - 1,
        "first_id": first,
        "last_id": last,
        "sums": describe_file(folder, f"{stem}.sums"),
        "offsets": describe_file(folder, f"{stem}.offsets"),
    }


def describe_file(folder: Path, name: str) -> dict[str, Any]:
    """What the manifest says of a file: name, size in bytes and SHA-256."""
    path = folder / name
    return {"file": name, "size": path.stat().st_size, "sha256": file_sha256(path)}


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(manifest: Mapping[str, Any], with_shards: bool) -> Iterator[dict[str, Any]]:
    """Every entry of the manifest that describes a file."""
    yield manifest["tokenizer"]
    for source in manifest["sources"].values():
        for entry in [*(source["shards"] if with_shards else ()), source["holdout"]]:
            yield entry
            yield entry["sums"]
            yield entry["offsets"]
        yield source["holdout"]["texts"]
