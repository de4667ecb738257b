"""Configurations as plain JSON values: their differences, their hash, their leaves."""

from __future__ import annotations

import hashlib
import json
import typing
from collections.abc import Mapping
from typing import Any


def differences(
    former: Any, present: Any, ignored: typing.Container[str] = (), path: str = ""
) -> list[str]:
    """The keys in which two configurations (plain types) differ, each with both values.

    `ignored` are top-level keys, or full paths, that may differ.
    """
    if not (isinstance(former, dict) and isinstance(present, dict)):
        return [] if former == present else [f"{path} ({former!r} then, {present!r} now)"]
    found = []
    for key in sorted(former.keys() | present.keys()):
        inner = f"{path}.{key}" if path else key
        if inner not in ignored:
            found += differences(former.get(key), present.get(key), ignored, inner)
    return found


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(tree: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """The leaves of nested mappings under joined names; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            inner = flatten(value, separator)
            flat.update({f"{key}{separator}{name}": leaf for name, leaf in inner.items()})
        else:
            flat[key] = value
    return flat
