"""What became of each source's items: the table at the end of prepare, and the same as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COLUMNS = {  # of the table; the rest of the manifest's counts is under "other"
    "documents": "documents",
    "bytes": "bytes",
    "tokens": "tokens",
    "rows": "rows",
    "duplicate": "duplicates",
    "held_out": "held out",
    "filtered": "filtered",
    "contaminated": "contaminated",
    "empty": "empty",
    "invalid_utf8": "not UTF-8",
    "other": "other",
}
_OTHER = (
    "too_long",
    "malformed",
    "over_max_bytes",
    "reserved",
    "holdout_over_cap",
    "reserved_over_cap",
)


def counts_of(manifest: dict[str, Any]) -> dict[str, dict[str, int]]:
    """For each source the numbers of the table, by the keys of `COLUMNS`."""
    row_length = manifest["made_by"].get("row_length") or 0
    found = {}
    for name, entry in manifest["sources"].items():
        counts = entry["counts"]
        known = {key: entry.get(key, counts.get(key, 0)) for key in COLUMNS}
        known["rows"] = max(0, entry["tokens"] - 1) // row_length if row_length else 0
        known["other"] = sum(counts.get(key, 0) for key in _OTHER)
        found[name] = known
    return found


def table(manifest: dict[str, Any]) -> Iterator[str]:
    """Lines of the table, and what each step took. Rows are of the configured sequence length."""
    rows = [["source", *COLUMNS.values()]]
    rows += [
        [name, *(f"{counts[key]:,}" for key in COLUMNS)]
        for name, counts in counts_of(manifest).items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield f"data: {first.ljust(widths[0])}  " + "  ".join(cells)
    seconds = manifest["made_by"]["seconds"]
    yield "data: " + ", ".join(f"{step} {took:.1f} s" for step, took in seconds.items())


def metrics(manifest: dict[str, Any]) -> dict[str, float]:
    """The same numbers under `prepare/<source>/<column>`."""
    return {
        f"prepare/{name}/{key}": float(value)
        for name, counts in counts_of(manifest).items()
        for key, value in counts.items()
    }
