"""Stopping a run in order: finish the step, write a checkpoint, exit with 75.

In a pod SIGTERM reaches process 1, the command, and not the workers that train. So the command
leaves a file in the run's folder; rank 0 looks for it at every step and all ranks stop together.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


def requested(file: Path) -> bool:
    """Whether someone asked this run to stop."""
    return file.exists()


@contextlib.contextmanager
def graceful_stop(file: Path) -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into a request in `file`; a second one interrupts at once."""
    file.unlink(missing_ok=True)

    def ask(number: int, frame: FrameType | None) -> None:
        if requested(file):
            raise KeyboardInterrupt
        file.touch()
        print(
            f"\n{signal.Signals(number).name}: finishing the step and writing a checkpoint; "
            "once more to stop at once",
            flush=True,
        )

    former = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        file.unlink(missing_ok=True)
