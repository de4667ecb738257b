"""Follows a training run from its metrics file: progress on the terminal, metrics to MLflow.

One thread of the driver does both, whether training runs in this process or on other machines.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm

from pipeline.runs import RunFolder
from pipeline.tracking import Tracker, TrackingError
from pipeline.train.metrics import read_records
from pipeline.train.schedule import Schedule

SHIP_SECONDS = 5.0
REFRESH_SECONDS = 0.5


class Follower:
    """A context manager around training."""

    def __init__(self, run: RunFolder, tracker: Tracker, schedule: Schedule) -> None:
        self._run, self._tracker, self._schedule = run, tracker, schedule
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._offset = run.metrics.stat().st_size if run.metrics.is_file() else 0
        self._bar = tqdm(
            total=schedule.num_steps,
            unit="step",
            mininterval=REFRESH_SECONDS if sys.stderr.isatty() else 15.0,
            dynamic_ncols=True,
            bar_format="{desc} {bar:10} {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {postfix}",
        )
        self._bar.set_description_str("training")
        self._lost = ""

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show()
        self._bar.close()
        self._ship()

    def _follow(self) -> None:
        ticks = 0
        while not self._stop.wait(REFRESH_SECONDS):
            self._show()
            ticks += 1
            if ticks % round(SHIP_SECONDS / REFRESH_SECONDS) == 0:
                self._ship()

    def _ship(self) -> None:
        try:
            self._tracker.ship()
            self._lost = ""
        except TrackingError as error:
            if not self._lost:
                tqdm.write(f"tracking store unreachable, metrics are kept on disk: {error}")
            self._lost = str(error)

    def _show(self) -> None:
        record: dict[str, Any] | None = None
        for item, offset in read_records(self._run.metrics, self._offset):
            self._offset = offset
            if item["kind"] == "train":
                record = item
            if "note" in item:
                tqdm.write(item["note"])
        if record is None:
            return
        values = record["metrics"]
        self._bar.set_postfix_str(
            f"{record['tokens'] / 1e6:.2f}M tokens, "
            f"{values['train/tokens_per_second']:,.0f} tokens/s, "
            f"loss {values['train/loss']:.3f}, lr {values['train/learning_rate']:.1e}, "
            f"phase {values['train/phase'] + 1}/{len(self._schedule.phases)}",
            refresh=False,
        )
        self._bar.update(record["step"] - self._bar.n)
