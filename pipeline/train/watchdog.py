"""Ends a rank that waits for ever, and names the rank it waits for.

Before every collective a rank posts to the process group's store how many it has reached, the same
on all ranks, and which. Where the next one stays away for longer than the timeout, a thread reads
all posts, names the ranks that are behind, and ends the process: whoever launched it starts it anew
from the last checkpoint. It works for any backend, whatever the collective's own timeout does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.train.parallel import Rank, several

EXIT_CODE = 75  # try again


class Watchdog:
    """A context manager around training. `report` is a file that the message is left in."""

    def __init__(self, rank: Rank, timeout_seconds: float, report: Path) -> None:
        self._rank, self._timeout, self._report = rank, timeout_seconds, report
        self._place = "the start of training"
        self._count, self._since = 0, time.monotonic()
        self._closed = threading.Event()
        self._store: Any = None

    def __enter__(self) -> Watchdog:
        self._since = time.monotonic()
        if several() and self._timeout:
            default_store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore("watchdog", default_store)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def reached(self, place: str) -> None:
        """This rank is about to wait for the others at `place`."""
        self._count, self._place, self._since = self._count + 1, place, time.monotonic()
        if self._store is not None:
            self._store.set(str(self._rank.index), f"{self._count} {place}")

    def _watch(self) -> None:
        while not self._closed.wait(min(self._timeout / 10, 5.0)):
            waited = time.monotonic() - self._since
            if waited > self._timeout:
                message = describe(self._posts(), waited)
                self._report.write_text(message)
                print(message, file=sys.stderr, flush=True)
                os._exit(EXIT_CODE)

    def _posts(self) -> dict[int, tuple[int, str]]:
        """How many places each rank has reached, and the last of them."""
        posts = {}
        for rank in range(self._rank.size):
            key = str(rank)
            post = self._store.get(key).decode() if self._store.check([key]) else "0 nothing yet"
            count, _, place = post.partition(" ")
            posts[rank] = (int(count), place)
        return posts


def describe(posts: dict[int, tuple[int, str]], waited: float) -> str:
    """Which ranks the others wait for, and where, in words."""
    most, place = max(posts.values())
    behind = [
        f"rank {rank} (last seen at {where})"
        for rank, (count, where) in posts.items()
        if count < most
    ]
    who = ", ".join(behind) or (
        "no rank in particular: all came this far; one stands still since, or the network is down"
    )
    return f"no progress for {waited:.0f} s at {place}; waiting for {who}"
