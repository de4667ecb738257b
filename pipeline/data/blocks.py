"""Files of token ids that are checked whenever they are read, in blocks of 512 bytes.

    <stem>.tokens   the ids and nothing else, so that any program may map them
    <stem>.sums     uint64, one for each block: the sum of its 64 words, wrapping

A sum costs less than the copy that it guards and finds every change of one word for certain, and
others but for one in 2^64. A range is read with the blocks that it lies in, from local disk or by
range from an object store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
import fsspec.implementations.arrow
import numpy as np
import pyarrow.fs
from numpy.typing import NDArray

from pipeline.config import ConfigError

BLOCK = 512
_WORDS = BLOCK // 8
_OPEN_FILES = 256  # systems limit how many files a process maps
_REQUESTS = 32  # to an object store at a time
REMEDY = "delete the folder and run prepare again"

Raw = NDArray[np.uint8]
Tokens = NDArray[np.unsignedinteger]
Integers = NDArray[np.int64]


class DataError(ConfigError):
    """A prepared corpus that cannot be used: the message names the file and the way out."""


class DamagedShardError(DataError):
    """A file of tokens is missing or is not what the manifest describes. `file` is its name."""

    def __init__(self, place: str | Path, file: str, problem: str) -> None:
        self.file = file
        super().__init__(
            f"{place}/{file}: {problem}; {REMEDY}, or train on without that shard's rows by "
            "data.on_corrupt=skip"
        )


def block_sums(raw: Raw) -> NDArray[np.uint64]:
    """The sum of each block's words; an incomplete last block counts as if zeros followed."""
    whole = len(raw) // BLOCK * BLOCK
    rest = np.zeros(BLOCK if whole < len(raw) else 0, np.uint8)
    rest[: len(raw) - whole] = raw[whole:]
    parts = [part.view("<u8").reshape(-1, _WORDS).sum(axis=1) for part in (raw[:whole], rest)]
    return np.concatenate(parts)


def write_sums(tokens: Path, sums: Path) -> None:
    """Write the sums of a file of tokens."""
    with tokens.open("rb") as read, sums.open("wb") as write:
        while part := read.read(1 << 24):
            write.write(block_sums(np.frombuffer(part, np.uint8)).tobytes())


def filesystem(uri: str) -> tuple[Any, str]:
    """The file system of an address, by fsspec or else by pyarrow (S3, GCS, HDFS), and its path."""
    try:
        return fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError):
        system, path = pyarrow.fs.FileSystem.from_uri(uri)
        return fsspec.implementations.arrow.ArrowFSWrapper(system), path


class ShardFiles:
    """Where the shards of a corpus lie, and how ranges of them are read."""

    map: Callable[..., Iterable[Any]] = map  # how to read many ranges

    def __init__(self, place: str | Path, dtype: np.dtype[Any]) -> None:
        self.place, self.dtype = place, dtype

    def read(self, shard: Mapping[str, Any], begin: int, count: int) -> Tokens:
        """Tokens begin .. begin + count - 1 of a shard, by its entry in the manifest.

        Raises `DamagedShardError` unless they are as they were written.
        """
        if not count:
            return np.empty(0, self.dtype)
        size = self.dtype.itemsize
        first, end = begin * size // BLOCK, -(-(begin + count) * size // BLOCK)
        raw = self._bytes(shard, first * BLOCK, min(end * BLOCK, shard["size"]))
        if not np.array_equal(block_sums(raw), self._sums(shard, first, end)):
            raise DamagedShardError(
                self.place, shard["file"], f"bytes {first * BLOCK:,} on are not as written"
            )
        return np.frombuffer(raw, self.dtype)[begin - first * BLOCK // size :][:count]

    def _bytes(self, shard: Mapping[str, Any], start: int, end: int) -> Raw:
        raise NotImplementedError

    def _sums(self, shard: Mapping[str, Any], first: int, end: int) -> NDArray[np.uint64]:
        raise NotImplementedError


class LocalFiles(ShardFiles):
    """Shards in a folder, mapped into memory when first read."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        super().__init__(folder, dtype)
        self._open = lru_cache(_OPEN_FILES)(self._map)

    def _bytes(self, shard: Mapping[str, Any], start: int, end: int) -> Raw:
        return self.mapped(shard)[0][start:end]

    def _sums(self, shard: Mapping[str, Any], first: int, end: int) -> NDArray[np.uint64]:
        return self.mapped(shard)[1][first:end]

    def mapped(self, shard: Mapping[str, Any]) -> tuple[Raw, NDArray[np.uint64]]:
        """A shard's bytes and sums. Its size is asked each time: to touch what a mapped file has
        lost kills the process. Raises `DamagedShardError`."""
        try:
            size = os.stat(f"{self.place}/{shard['file']}").st_size
            if size == shard["size"]:
                return self._open(shard["file"], shard["sums"]["file"])
            problem = f"has {size} bytes, not {shard['size']}"
        except FileNotFoundError as error:
            problem = f"{Path(error.filename).name} is missing"
        raise DamagedShardError(self.place, shard["file"], problem)

    def _map(self, file: str, sums: str) -> tuple[Raw, NDArray[np.uint64]]:
        raw = np.asarray(np.memmap(Path(self.place) / file, np.uint8, mode="r"))
        found = np.fromfile(Path(self.place) / sums, "<u8")
        if len(found) != -(-len(raw) // BLOCK):
            raise DamagedShardError(self.place, file, f"{sums} has {len(found)} sums")
        return raw, found


class RemoteFiles(ShardFiles):
    """Shards in an object store, read by range: two requests for each range.

    `place` is an address that fsspec or pyarrow knows.
    """

    def __init__(self, place: str, dtype: np.dtype[Any]) -> None:
        super().__init__(place.rstrip("/"), dtype)
        self._system, self._path = filesystem(place.rstrip("/"))
        self.map = ThreadPoolExecutor(_REQUESTS, "range-read").map

    def _bytes(self, shard: Mapping[str, Any], start: int, end: int) -> Raw:
        return self._fetch(shard["file"], start, end)

    def _sums(self, shard: Mapping[str, Any], first: int, end: int) -> NDArray[np.uint64]:
        return self._fetch(shard["sums"]["file"], 8 * first, 8 * end).view("<u8")

    def _fetch(self, file: str, start: int, end: int) -> Raw:
        try:
            raw = self._system.cat_file(f"{self._path}/{file}", start=start, end=end)
        except FileNotFoundError:
            raise DamagedShardError(self.place, file, "missing") from None
        if len(raw) != end - start:
            raise DamagedShardError(self.place, file, f"ends before byte {end:,}")
        return np.frombuffer(raw, np.uint8)
