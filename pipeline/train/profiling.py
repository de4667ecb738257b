"""A window of steps under torch's profiler, its trace in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


class ProfiledSteps:
    """Profiles from the first to the last of `steps`; nothing where there are none.

    The trace, named after the steps that it holds, opens in chrome://tracing and in Perfetto. A run
    that is interrupted within the window and goes on leaves two.
    """

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = 0  # that were profiled

    def before(self, step: int) -> None:
        """`step` begins."""
        if not self._steps:
            return
        if step > self._steps[-1]:  # the window's last step was left out
            self.close()
        elif step >= self._steps[0] and self._profiler is None:
            self._profiler, self._first = torch.profiler.profile(record_shapes=True), step
            self._profiler.start()

    def after(self, step: int) -> None:
        """`step` is done."""
        self._last = step
        if self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what was profiled."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._folder.mkdir(exist_ok=True)
        name = f"steps-{self._first}-{self._last}.json.gz"
        self._profiler.export_chrome_trace(str(self._folder / name))
        self._profiler = None
