"""The metrics file: one JSON object a line, appended by rank 0, read by everything else.

    {"kind": "train", "step": 12, "tokens": 98304, "time": 1767225600.0,
     "metrics": {"train/loss": 5.1}}

It is the source of truth of a run's curves; MLflow, the progress bar and the report are fed from
it. `step` counts optimizer steps done. After a resume replayed steps appear again: the last line of
a (kind, step) counts. A line that a crash tore, or that is no such record, is ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KEYS = {"kind", "step", "tokens", "time", "metrics"}


class MetricsError(RuntimeError):
    """A record could not be written; the message names the file, the cause and the way out."""


class MetricsFile:
    """Appends records, each flushed at once. Raises `MetricsError` where that cannot be."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("a+b")
        self._end_torn_line()

    def append(
        self, kind: str, step: int, tokens: int, metrics: Mapping[str, float], note: str = ""
    ) -> None:
        """Write one record; `note` is text for the person who watches."""
        record: dict[str, Any] = {
            "kind": kind,
            "step": step,
            "tokens": tokens,
            "time": time.time(),
            "metrics": dict(metrics),
        }
        if note:
            record["note"] = note
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise MetricsError(
                f"{self._path}: a record cannot be written ({error.strerror}); make room, and go "
                "on with the run from its newest checkpoint"
            ) from error

    def close(self) -> None:
        self._file.close()

    def _end_torn_line(self) -> None:
        if self._file.tell() == 0:
            return
        self._file.seek(-1, 2)
        if self._file.read(1) != b"\n":
            self._file.write(b"\n")


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, offset after it) of each whole line from a byte offset on; none without a file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.keys() >= KEYS:
                yield record, offset


def final_records(path: Path) -> list[dict[str, Any]]:
    """The run's curve: records in order of step, the last one written of each (kind, step)."""
    last = {(record["kind"], record["step"]): record for record, _ in read_records(path)}
    return sorted(last.values(), key=lambda record: record["step"])
