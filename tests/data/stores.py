"""A corpus in an object store that is slow to answer and counts what it is asked."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

LATENCY = 0.05  # seconds a request


class SlowStore(MemoryFileSystem):
    """An in-memory file system whose every range read takes `LATENCY`."""

    protocol = "slow"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012
    requests: list[int] = []  # noqa: RUF012 - bytes of each, in the order they came
    at_once, most_at_once = 0, 0
    lock = threading.Lock()

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        cls = type(self)
        with cls.lock:
            cls.at_once += 1
            cls.most_at_once = max(cls.at_once, cls.most_at_once)
        time.sleep(LATENCY)
        raw = super().cat_file(path, start, end, **kwargs)
        with cls.lock:
            cls.at_once -= 1
            cls.requests.append(len(raw))
        return raw


fsspec.register_implementation("slow", SlowStore, clobber=True)


def upload(folder: Path, uri: str) -> str:
    """Copy a corpus into a store. Returns its address."""
    system, path = fsspec.core.url_to_fs(uri)
    for file in folder.rglob("*"):
        if file.is_file():
            system.pipe_file(f"{path}/{file.relative_to(folder)}", file.read_bytes())
    return uri
