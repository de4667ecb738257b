"""How a benchmark prints what it found: its method and a table, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any


def show(
    method: str | None,
    result: dict[str, Any],
    header: str,
    line: Callable[[dict[str, Any]], str],
    notes: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    """Print `result`, which holds machine, rows and ratios.

    Args:
        method: what was measured and how: the script's docstring.
        line: a row as text, under `header`.
        notes: lines below the table.
    """
    if as_json:
        print(json.dumps(result))
        return
    print(method)
    print(result["machine"])
    print(header)
    for row in result["rows"]:
        print(line(row))
    for name, value in result["ratios"].items():
        print(f"{name} = {value}")
    for note in notes:
        print(note)
