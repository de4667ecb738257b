"""Shards that another prepared corpus has already: linked, not made again.

A source's entry in the manifest carries `made_of`: a hash of the documents chosen, the tokenizer
and the layout. Equal `made_of` and name, equal files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config import DataConfig, digest
from pipeline.data.files import link
from pipeline.data.selection import Documents, Rows, Selection
from pipeline.data.shards import DataError, file_sha256, read_manifest

_PIECE = 65_536  # documents


def made_of(
    data: DataConfig, tokenizer: str, documents: Documents, selection: Selection, number: int
) -> str:
    """The hash of all that decides a source's files. tokenizer: the SHA-256 of its file."""
    layout = [data.shard_tokens, data.packing]
    if data.packing == "best_fit":
        layout.append(data.row_length)
    chosen = [
        _digest_of(documents, rows[number])
        for rows in (selection.training, selection.holdout, selection.reserved)
    ]
    names = [data.tokenizer.eos_token, data.tokenizer.bos_token]
    return digest([tokenizer, names, layout, chosen])


def _digest_of(documents: Documents, rows: Rows) -> str:
    """`digest` of a list of one string, all the hashes in hexadecimal, which is made in pieces."""
    found = hashlib.sha256(b'["')
    for first in range(0, len(rows), _PIECE):
        words = documents.hash_N4[rows[first : first + _PIECE]].astype(">u8")
        found.update(words.tobytes().hex().encode())
    found.update(b'"]')
    return found.hexdigest()


def reusable(corpora: Path, name: str, wanted: str) -> tuple[Path, dict[str, Any]] | None:
    """The folder of a corpus whose source of that name is made of the same, and its entry."""
    for manifest in sorted(corpora.glob("[!.]*/manifest.json")):
        try:
            entry = read_manifest(manifest.parent)["sources"].get(name)
        except DataError:  # of another version, or damaged
            continue
        if entry and entry.get("made_of") == wanted and _is_whole(manifest.parent, entry):
            return manifest.parent, entry
    return None


def link_files(entry: Mapping[str, Any], source: Path, target: Path) -> None:
    """Give all files of a source's entry a second name in another corpus's folder."""
    for described in _files(entry):
        link(source / described["file"], target / described["file"])


def _is_whole(folder: Path, entry: Mapping[str, Any]) -> bool:
    """Read through: a damaged shard would otherwise pass from corpus to corpus."""
    return all(
        (folder / described["file"]).is_file()
        and file_sha256(folder / described["file"]) == described["sha256"]
        for described in _files(entry)
    )


def _files(value: Any) -> Iterator[Mapping[str, Any]]:
    """Everything within an entry that describes a file."""
    if isinstance(value, Mapping):
        if "file" in value and "sha256" in value:
            yield value
        for inner in value.values():
            yield from _files(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _files(inner)
