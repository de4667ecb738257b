"""The sources of text, cut into tasks that read independently of each other.

A task names a few files, or a range of generated documents; `read_task` yields its items. An item's
id is (source, file, row): it depends on the input alone, not on who reads it, or when.
"""

from __future__ import annotations

import glob
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec.implementations.local
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import ConfigError, DataConfig, SourceConfig, nearest
from pipeline.data import builtin, mathematics
from pipeline.data.blocks import filesystem
from pipeline.data.document import (
    EMPTY,
    MALFORMED,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    Item,
    from_bytes,
    from_text,
)

BUILTIN = ("python", "prose", "mathematics")
ENDINGS = {
    "text": ("",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
}
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_TASK_BYTES = 32 << 20  # of input files, about
_TASK_FILES = 2000
_BUILTIN_TASKS = 8
SOURCE_SHIFT = 56  # an id has the source's number above this bit
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class InputFile:
    """A file of a source: its address, bytes, and what tells a later version from this one."""

    uri: str
    size: int
    version: str


@dataclass(frozen=True)
class ReadTask:
    """Items `first_file`... of a source: files, or indices of generated documents."""

    source: int  # position among the configuration's sources
    config: SourceConfig
    seed: int
    first: int
    inputs: tuple[str, ...] = ()  # files
    count: int = 0  # generated documents


def check_sources(data: DataConfig) -> None:
    """Every source exists, is not empty and has its text column. Raises `ConfigError`.

    Lists folders and looks into one file of each source; reads no corpus.
    """
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        if not _SOURCE_NAME.fullmatch(name):
            raise ConfigError(f"{key}: a source's name has letters, digits, '-' and '_' only")
        if source.builtin is None:
            if source.format not in ENDINGS:
                raise ConfigError(
                    f"{key}.format: no format {source.format!r}; {nearest(source.format, ENDINGS)}"
                )
            _check_column(source, list_files(source, key)[0].uri, key)
        elif source.builtin not in BUILTIN:
            raise ConfigError(
                f"{key}.builtin: no source {source.builtin!r}; {nearest(source.builtin, BUILTIN)}"
            )


def identity(data: DataConfig) -> list[Any]:
    """What the corpus will be made of, as JSON: changes when an input does. Reads no text."""
    found: list[Any] = []
    for name, source in data.sources.items():
        if source.builtin is None:
            files = list_files(source, f"data.sources.{name}")
            found.append([name, [[file.uri, file.size, file.version] for file in files]])
        elif source.builtin == "mathematics":
            found.append([name, mathematics.VERSION])
        else:
            found.append([name, builtin.VERSION, sys.version])
    return found


def list_files(source: SourceConfig, key: str) -> list[InputFile]:
    """The source's files, sorted, each once. Raises `ConfigError` for a place without any."""
    files: dict[str, InputFile] = {}
    for uri in source.uris:
        found = _list_uri(uri, ENDINGS[source.format], key)
        if all(file.size == 0 for file in found):
            endings = " or ".join(f"*{ending}" for ending in ENDINGS[source.format])
            raise ConfigError(
                f"{key}.uris: no {source.format} file ({endings}) with anything in it at {uri}"
            )
        files |= {file.uri: file for file in found}
    return [files[uri] for uri in sorted(files)]


def read_tasks(data: DataConfig) -> list[ReadTask]:
    """All the reading, in tasks of similar size."""
    tasks: list[ReadTask] = []
    for number, (name, source) in enumerate(data.sources.items()):
        if source.builtin == "mathematics":
            total = mathematics.num_worksheets(source.max_bytes, data.holdout_fraction)
            step = -(-total // _BUILTIN_TASKS)
            tasks += [
                ReadTask(number, source, data.seed, first, count=min(step, total - first))
                for first in range(0, total, step)
            ]
            continue
        if source.builtin is not None:
            names = builtin.library_files()
            groups = [names[i::_BUILTIN_TASKS] for i in range(_BUILTIN_TASKS)]
        else:
            groups = list(_groups(list_files(source, f"data.sources.{name}")))
        first = 0
        for group in groups:
            tasks.append(ReadTask(number, source, data.seed, first, tuple(group)))
            first += len(group)
    return tasks


def read_task(task: ReadTask) -> Iterator[tuple[int, Item]]:
    """The task's items with their ids, unique over all sources."""
    if task.config.builtin == "mathematics":
        for index in range(task.first, task.first + task.count):
            yield _item_id(task.source, index, 0), mathematics.worksheet(task.seed, index)
        return
    for file, name in enumerate(task.inputs, start=task.first):
        try:
            for row, item in enumerate(_read_input(task.config, name)):
                yield _item_id(task.source, file, row), item
        except (OSError, ValueError) as error:  # pyarrow's errors are among these
            raise ConfigError(f"{name}: cannot be read as {task.config.format}: {error}") from None


def _item_id(source: int, file: int, row: int) -> int:
    assert source < 1 << 7
    assert file < 1 << 24
    assert row < 1 << 32
    return source << SOURCE_SHIFT | file << 32 | row


def _read_input(source: SourceConfig, name: str) -> Iterator[Item]:
    if source.builtin == "python":
        return iter([builtin.code_document(name)])
    if source.builtin == "prose":
        return builtin.prose_documents(name)
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}
    return readers[source.format](name, source.text_column)


def _read_text(uri: str, _column: str) -> Iterator[Item]:
    with _open(uri) as file:
        yield from_bytes(file.read(MAX_DOCUMENT_BYTES + 1))


def _read_jsonl(uri: str, column: str) -> Iterator[Item]:
    with _open(uri) as file:
        for line in _lines(file):
            yield _json_item(line, column)


def _lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Lines; of one too long for a document only the beginning is kept."""
    limit = 8 * MAX_DOCUMENT_BYTES
    while line := file.readline(limit):
        yield line
        while len(line) == limit and not line.endswith(b"\n"):
            line = file.readline(limit)


def _json_item(line: bytes, column: str) -> Item:
    if not line.strip():
        return Item(EMPTY)
    if len(line) >= 8 * MAX_DOCUMENT_BYTES:
        return Item(TOO_LONG)
    try:
        text = json.loads(line)[column]
    except UnicodeDecodeError:
        return from_bytes(line)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Item(MALFORMED)
    return from_text(text) if isinstance(text, str) else Item(EMPTY if text is None else MALFORMED)


def _read_parquet(uri: str, column: str) -> Iterator[Item]:
    with _open(uri) as file, pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for value in batch.column(0).cast(pa.large_binary()):
                raw = value.as_py()
                yield Item(EMPTY) if raw is None else from_bytes(raw)


def _open(uri: str) -> Any:
    """The bytes of a local or remote file, decompressed by its ending."""
    system, path = filesystem(uri)
    file = system.open(path, "rb")
    for ending, compression in _COMPRESSION.items():
        if path.endswith(ending):
            return io.BufferedReader(pa.CompressedInputStream(file, compression))
    return file


def _list_uri(uri: str, endings: tuple[str, ...], key: str) -> list[InputFile]:
    """The files at an address: itself, a folder's at any depth, or what a glob matches."""
    try:
        system, path = filesystem(uri)
        if glob.has_magic(uri):
            found = {p: i for p, i in system.glob(path, detail=True).items() if i["type"] == "file"}
        elif system.isdir(path):
            found = {
                p: i
                for p, i in system.find(path, detail=True).items()
                if p.endswith(endings) and not p.rsplit("/", 1)[-1].startswith((".", "_"))
            }
        else:
            found = {path: system.info(path)} if system.exists(path) else {}
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"{key}.uris: cannot read {uri}: {error}") from None
    scheme = uri.split("://")[0] + "://" if "://" in uri and not _is_local(system) else ""
    return [
        InputFile(scheme + path.removeprefix(scheme), info["size"], _version(info))
        for path, info in found.items()
    ]


def _is_local(system: Any) -> bool:
    return isinstance(system, fsspec.implementations.local.LocalFileSystem)


def _version(info: dict[str, Any]) -> str:
    """What the file system says of a file's version: a hash of it, or its time."""
    keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified")
    return next((str(info[key]) for key in keys if info.get(key) is not None), "")


def _groups(files: list[InputFile]) -> Iterator[list[str]]:
    """Consecutive files, so many that a task has enough to do."""
    group: list[str] = []
    size = 0
    for file in files:
        group.append(file.uri)
        size += file.size
        if size >= _TASK_BYTES or len(group) >= _TASK_FILES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_column(source: SourceConfig, uri: str, key: str) -> None:
    """The first file has the text column."""
    if source.format == "text":
        return
    try:
        with _open(uri) as file:
            if source.format == "parquet":
                names = pq.read_schema(file).names
            else:
                names = list(json.loads(next(_lines(file), b"{}")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {uri} is no {source.format} file: {error}") from None
    if source.text_column not in names:
        raise ConfigError(
            f"{key}.text_column: {uri} has no {source.text_column!r}; it has {', '.join(names)}"
        )
