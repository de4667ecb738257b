"""The sources of text, cut into tasks that read independently of each other.

A task names a few files, or a range of generated documents; `read_task` yields its items. An item's
id is (source, file, row): it depends on the input alone, not on who reads it, or when.
"""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec.implementations.local
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import ConfigError, DataConfig, SourceConfig, digest, nearest
from pipeline.data import builtin, mathematics
from pipeline.data.blocks import filesystem
from pipeline.data.decontaminate import Evaluations, load_evaluations
from pipeline.data.document import (
    CONTAMINATED,
    DOCUMENT,
    EMPTY,
    FILTERED,
    INVALID_UTF8,
    MALFORMED,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    Item,
    from_bytes,
    from_text,
)
from pipeline.data.filters import Filter, filters_of, has_length

BUILTIN = ("python", "prose", "mathematics")
ENDINGS = {
    "text": ("",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
    "huggingface": (".arrow", ".parquet"),  # a folder of `save_to_disk`, or a name on the hub
}
VERSION = 2  # of the reading: raise it when the same files would give other documents
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_TASK_BYTES = 32 << 20  # of input files, about
_TASK_FILES = 2000
_BUILTIN_TASKS = 8
_TABLE_ROWS = 1024
_FIRST_LINES = 100  # of a file of JSON lines, looked at for its columns
_TEXT_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_null,
)
_NOT_DATA = (".", "_", "cache-", "indices-")  # beginnings of names; the last two of `datasets`
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
    """Items of a source from file, or generated document, `first` on.

    `key` changes with whatever the items depend on: equal key, equal items.
    """

    source: int  # position among the configuration's sources
    config: SourceConfig
    seed: int
    first: int
    inputs: tuple[str, ...] = ()  # files
    count: int = 0  # generated documents
    key: str = ""

    @property
    def first_id(self) -> int:
        """The id of row 0 of the first file."""
        return _item_id(self.source, self.first, 0)


def check_sources(data: DataConfig) -> None:
    """Every source exists, is not empty and has its columns. Raises `ConfigError`.

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
            first = next(file for file in list_files(source, key) if file.size)
            _check_columns(source, first.uri, key)
        elif source.filters:
            raise ConfigError(f"{key}.filters: a builtin source has no columns")
        elif source.builtin not in BUILTIN:
            raise ConfigError(
                f"{key}.builtin: no source {source.builtin!r}; {nearest(source.builtin, BUILTIN)}"
            )


def identity(data: DataConfig) -> list[Any]:
    """What the corpus will be made of, as JSON: changes when an input does. Reads no text."""
    found: list[Any] = [[file.uri, file.size, file.version] for file in evaluation_files(data)]
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
        found = _list_uri(uri, ENDINGS[source.format], f"{key}.uris")
        if all(file.size == 0 for file in found):
            endings = " or ".join(f"*{ending}" for ending in ENDINGS[source.format])
            raise ConfigError(
                f"{key}.uris: no {source.format} file ({endings}) with anything in it at {uri}"
            )
        listed = {file.uri: file for file in found}
        files |= _training_split(listed) if source.format == "huggingface" else listed
    return [files[uri] for uri in sorted(files)]


def _training_split(files: dict[str, InputFile]) -> dict[str, InputFile]:
    """Only what lies under a name that begins with `train`, where there is such a name."""
    common = os.path.commonpath([os.path.dirname(uri) for uri in files])
    chosen = [uri for uri in files if re.search(r"(^|/)train", uri.removeprefix(common))]
    return {uri: files[uri] for uri in chosen or files}


def evaluation_files(data: DataConfig) -> list[InputFile]:
    """The files that no document may overlap with, sorted. Raises `ConfigError` for none."""
    key = "data.decontaminate"
    files: dict[str, InputFile] = {}
    for uri in data.decontaminate:
        found = _list_uri(uri, (".json", ".jsonl", ".jsonl.gz", ".jsonl.zst"), key)
        if not found:
            raise ConfigError(f"{key}: no file at {uri}")
        files |= {file.uri: file for file in found}
    return [files[uri] for uri in sorted(files)]


def read_evaluations(data: DataConfig) -> tuple[tuple[str, bytes], ...]:
    """The contents of `evaluation_files`."""
    found = []
    for listed in evaluation_files(data):
        with _open(listed.uri) as file:
            found.append((listed.uri, file.read()))
    return tuple(found)


def read_tasks(data: DataConfig) -> list[ReadTask]:
    """All the reading, in tasks of similar size."""
    tasks: list[ReadTask] = []
    evaluations = [[file.uri, file.size, file.version] for file in evaluation_files(data)]
    for number, (name, source) in enumerate(data.sources.items()):
        decisive = replace(source, uris=(), max_bytes=None, repeat=True)
        common: list[Any] = [VERSION, repr(decisive), evaluations]
        first = 0
        if source.builtin == "mathematics":
            total = mathematics.num_worksheets(source.max_bytes, data.holdout_fraction)
            step = -(-total // _BUILTIN_TASKS)
            for first in range(0, total, step):
                count = min(step, total - first)
                key = digest([*common, mathematics.VERSION, data.seed, first, count])
                tasks.append(ReadTask(number, source, data.seed, first, (), count, key))
            continue
        if source.builtin is not None:
            names = builtin.library_files()
            common += [builtin.VERSION, sys.version]
            files = [InputFile(file, 0, "") for file in names]
            groups = [files[i::_BUILTIN_TASKS] for i in range(_BUILTIN_TASKS)]
        else:
            groups = list(_groups(list_files(source, f"data.sources.{name}")))
        for group in groups:
            key = digest([*common, [[file.uri, file.size, file.version] for file in group]])
            uris = tuple(file.uri for file in group)
            tasks.append(ReadTask(number, source, data.seed, first, uris, 0, key))
            first += len(group)
    return tasks


def read_task(
    task: ReadTask, evaluations: tuple[tuple[str, bytes], ...] = ()
) -> Iterator[tuple[int, Item]]:
    """The task's items with their ids, unique over all sources.

    `evaluations` are the files that no document may overlap with. Raises `ConfigError`.
    """
    compared = load_evaluations(evaluations) if evaluations else None
    for id_, item in _all_items(task):
        yield id_, _checked(item, task.config, compared)


def _all_items(task: ReadTask) -> Iterator[tuple[int, Item]]:
    if task.config.builtin == "mathematics":
        for index in range(task.first, task.first + task.count):
            yield _item_id(task.source, index, 0), mathematics.worksheet(task.seed, index)
        return
    for file, name in enumerate(task.inputs, start=task.first):
        try:
            for row, item in enumerate(_read_input(task.config, name)):
                yield _item_id(task.source, file, row), item
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise ConfigError(
                f"{name}: cannot be read as {task.config.format}, column "
                f"{task.config.text_column!r}: {error}"
            ) from None


def _checked(item: Item, source: SourceConfig, evaluations: Evaluations | None) -> Item:
    if item.status != DOCUMENT:
        return item
    if not has_length(item.text, source):
        return Item(FILTERED)
    if evaluations is not None and evaluations.overlap(item.text):
        return Item(CONTAMINATED)
    return item


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
    readers = {
        "text": _read_text,
        "jsonl": _read_jsonl,
        "parquet": _read_table,
        "huggingface": _read_table,
    }
    return readers[source.format](name, source)


def _read_text(uri: str, _source: SourceConfig) -> Iterator[Item]:
    with _open(uri) as file:
        yield from_bytes(file.read(MAX_DOCUMENT_BYTES + 1))


def _read_jsonl(uri: str, source: SourceConfig) -> Iterator[Item]:
    filters = filters_of(source, uri)
    with _open(uri) as file:
        for line in _lines(file):
            yield _json_item(line, source.text_column, filters)


def _lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Lines; of one too long for a document only the beginning is kept."""
    limit = 8 * MAX_DOCUMENT_BYTES
    while line := file.readline(limit):
        yield line
        while len(line) == limit and not line.endswith(b"\n"):
            line = file.readline(limit)


def _json_item(line: bytes, column: str, filters: tuple[Filter, ...]) -> Item:
    if not line.strip():
        return Item(EMPTY)
    if len(line) >= 8 * MAX_DOCUMENT_BYTES:
        return Item(TOO_LONG)
    try:
        record = json.loads(line.decode("utf-8-sig"))  # of bytes json would guess the encoding
        text = record[column]
    except UnicodeDecodeError:
        return Item(INVALID_UTF8)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Item(MALFORMED)
    if not all(one.keeps(record) for one in filters):
        return Item(FILTERED)
    return from_text(text) if isinstance(text, str) else Item(EMPTY if text is None else MALFORMED)


def _read_table(uri: str, source: SourceConfig) -> Iterator[Item]:
    """Rows of a Parquet file or of an Arrow stream, as `datasets` saves it."""
    filters = filters_of(source, uri)
    columns = list(dict.fromkeys([source.text_column, *(one.column for one in filters)]))
    with _open(uri) as file:
        for batch in _batches(file, uri, columns):
            texts = batch.column(source.text_column).cast(pa.large_binary())
            here = [one.column for one in filters if one.column in batch.schema.names]
            others = batch.select(list(dict.fromkeys(here))).to_pylist()
            for row, value in enumerate(texts):
                raw = value.as_py()
                if not all(one.keeps(others[row]) for one in filters):
                    yield Item(FILTERED)
                else:
                    yield Item(EMPTY) if raw is None else from_bytes(raw)


def _batches(file: Any, uri: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if uri.endswith(".arrow"):
        with pa.ipc.open_stream(file) as stream:
            for batch in stream:
                for start in range(0, len(batch), _TABLE_ROWS):
                    here = [name for name in columns if name in batch.schema.names]
                    yield batch.slice(start, _TABLE_ROWS).select(here)
    else:
        with pq.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=_TABLE_ROWS, columns=columns)


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
    if endings == ENDINGS["huggingface"] and _is_hub_name(uri):
        uri = f"hf://datasets/{uri}@refs/convert/parquet"  # where the hub keeps its conversion
    try:
        system, path = filesystem(uri)
        if glob.has_magic(uri) and not system.exists(path):  # names may hold brackets
            found = system.glob(path, detail=True)
            found = {p: i for p, i in found.items() if i["type"] in ("file", "other")}
        elif system.isdir(path):
            found = {
                p: i
                for p, i in system.find(path, detail=True).items()
                if p.endswith(endings) and not p.rsplit("/", 1)[-1].startswith(_NOT_DATA)
            }
        else:
            found = {path: system.info(path)} if system.exists(path) else {}
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"{key}: cannot read {uri}: {error}") from None
    if _is_local(system):
        _follow_links(found, key)
    scheme = uri.split("://")[0] + "://" if "://" in uri and not _is_local(system) else ""
    return [
        InputFile(scheme + path.removeprefix(scheme), info["size"], _version(info))
        for path, info in found.items()
    ]


def _follow_links(found: dict[str, dict[str, Any]], key: str) -> None:
    """Size and time of the files themselves, which fsspec tells of their links.

    Raises `ConfigError` for a link to nothing, or to a folder.
    """
    for path in [path for path, info in found.items() if info.get("islink")]:
        if not os.path.exists(path):
            raise ConfigError(f"{key}: {path} is a link to a file that is not there")
        if os.path.isdir(path):
            raise ConfigError(f"{key}: {path} is a link to a folder; name that folder as well")
        status = os.stat(path)
        found[path] = {**found[path], "size": status.st_size, "mtime": status.st_mtime}


def _is_hub_name(uri: str) -> bool:
    """`owner/name`, unless such a folder exists here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", uri) is not None and not Path(uri).exists()


def _is_local(system: Any) -> bool:
    return isinstance(system, fsspec.implementations.local.LocalFileSystem)


def _version(info: dict[str, Any]) -> str:
    """What the file system says of a file's version: a hash of it, or its time."""
    keys = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified")
    return next((str(info[key]) for key in keys if info.get(key) is not None), "")


def _groups(files: list[InputFile]) -> Iterator[list[InputFile]]:
    """Consecutive files, so many that a task has enough to do."""
    group: list[InputFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.size
        if size >= _TASK_BYTES or len(group) >= _TASK_FILES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_columns(source: SourceConfig, uri: str, key: str) -> None:
    """The first file has the text column and those of the filters."""
    filters = filters_of(source, key)
    if source.format == "text":
        if filters:
            raise ConfigError(f"{key}.filters: text files have no columns; use jsonl or parquet")
        return
    try:
        with _open(uri) as file:
            if source.format == "jsonl":
                names = list(_first_record(file))
            else:
                arrow = uri.endswith(".arrow")
                schema = pa.ipc.open_stream(file).schema if arrow else pq.read_schema(file)
                names = schema.names
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {uri} is no {source.format} file: {error}") from None
    columns = [("text_column", source.text_column)]
    columns += [("filters", one.column) for one in filters if source.format != "jsonl"]
    for field, column in columns:
        if column not in names:
            raise ConfigError(f"{key}.{field}: {uri} has no {column!r}; it has {', '.join(names)}")
    if source.format != "jsonl":
        kind = schema.field(source.text_column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(is_text(kind) for is_text in _TEXT_TYPES):
            raise ConfigError(
                f"{key}.text_column: {uri} has {kind} under {source.text_column!r}, and no text"
            )


def _first_record(file: io.BufferedReader) -> dict[str, Any]:
    """The first of the beginning's lines that is a JSON object; others are counted in reading."""
    for line in itertools.islice(_lines(file), _FIRST_LINES):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                return record
    raise ValueError(f"none of its first {_FIRST_LINES} lines is a JSON object")
