"""What a source yields: documents, and a note of every item that is none."""

from __future__ import annotations

from typing import NamedTuple

MAX_DOCUMENT_BYTES = 8 << 20  # a longer one is left out and counted

DOCUMENT = "document"
EMPTY = "empty"
INVALID_UTF8 = "invalid_utf8"
TOO_LONG = "too_long"
MALFORMED = "malformed"  # a line that is no JSON object with a string under the text column
FILTERED = "filtered"  # by the source's own filters
CONTAMINATED = "contaminated"  # it overlaps with an evaluation
NO_DOCUMENT = (EMPTY, INVALID_UTF8, TOO_LONG, MALFORMED, FILTERED, CONTAMINATED)


class Item(NamedTuple):
    """One item of a source; `text` is empty unless `status` is DOCUMENT."""

    status: str
    text: str = ""
    reserved: bool = False  # held out whatever its hash


def from_bytes(raw: bytes) -> Item:
    """The document in a file's bytes. A byte-order mark is dropped, all else stays as it is."""
    if len(raw) > MAX_DOCUMENT_BYTES:
        return Item(TOO_LONG)
    try:
        return from_text(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Item(INVALID_UTF8)


def from_text(text: str, reserved: bool = False) -> Item:
    """The document of a text, unless it is blank, too long or (lone surrogates) not Unicode."""
    if not text.strip():
        return Item(EMPTY)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return Item(INVALID_UTF8)
    return Item(TOO_LONG) if size > MAX_DOCUMENT_BYTES else Item(DOCUMENT, text, reserved)
