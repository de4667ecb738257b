"""Stopping a run in order: finish the step, write a checkpoint, exit with 75.

In a pod SIGTERM reaches process 1, the command, and not the workers that train. So the command
leaves a file in the run's folder; rank 0 looks for it at every step and all ranks stop together.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from pipeline.train.parallel import Rank

PREEMPTION_SECONDS = 5.0  # between two questions whether a node is being taken away


def requested(file: Path) -> bool:
    """Whether someone asked this run to stop."""
    return file.exists()


@contextlib.contextmanager
def graceful_stop(file: Path) -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into a request in `file`; a second one interrupts at once."""
    file.unlink(missing_ok=True)
    asked: list[int] = []  # signals; the file may be another's request

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
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


class StopSignals:
    """What rank 0 learns and all ranks act on: two numbers that ride along with a step's sums.

    preempted: whether a node is about to be taken away; every rank asks it together.
    """

    def __init__(self, rank: Rank, file: Path, preempted: Callable[[], bool] | None) -> None:
        self._rank, self._file, self._preempted = rank, file, preempted
        self._asked_at = time.monotonic()

    def own(self) -> tuple[float, float]:
        """Rank 0's: whether to stop after this step, and whether to ask for preemption."""
        if self._rank.index:
            return 0.0, 0.0
        due = self._preempted is not None and (
            time.monotonic() - self._asked_at > PREEMPTION_SECONDS
        )
        if due:
            self._asked_at = time.monotonic()
        return float(requested(self._file)), float(due)

    def heard(self, sums: Sequence[float]) -> tuple[bool, bool]:
        """Of the sums over ranks: whether to stop, and whether a checkpoint is needed now."""
        stop, ask = sums[0] > 0, sums[1] > 0
        noticed = ask and self._preempted is not None and self._preempted()
        return stop, stop or noticed
