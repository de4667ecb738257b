"""A window of steps under torch's profiler, its trace in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


class ProfiledSteps:
    """Profiles from the first to the last of `steps`; nothing where there are none.

    The trace opens in chrome://tracing and in Perfetto.
    """

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """`step` begins."""
        if self._steps and step == self._steps[0]:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        """`step` is done."""
        if self._profiler is None or step != self._steps[-1]:
            return
        self._profiler.stop()
        self._folder.mkdir(exist_ok=True)
        name = f"steps-{self._steps[0]}-{self._steps[-1]}.json.gz"
        self._profiler.export_chrome_trace(str(self._folder / name))
        self._profiler = None
