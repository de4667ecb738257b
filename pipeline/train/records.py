"""What rank 0 writes down of a run: every record of its metrics file, made in one place."""

from __future__ import annotations

from pipeline.train.clock import Clock, memory, speed
from pipeline.train.metrics import MetricsFile
from pipeline.train.parallel import summed_by_name
from pipeline.train.progress import Progress
from pipeline.train.setup import Setup
from pipeline.train.step import StepResult


class Records:
    """Rank 0's; on other ranks the same calls write nothing.

    Records carry the step and the tokens that `progress` stands at.
    """

    def __init__(self, setup: Setup, progress: Progress, clock: Clock) -> None:
        self._setup, self._progress, self._clock = setup, progress, clock
        self._file = MetricsFile(setup.run.metrics) if setup.rank.index == 0 else None

    def append(self, kind: str, values: dict[str, float], note: str = "") -> None:
        """Any record; `note` is text for the person who watches."""
        if self._file:
            step = self._progress.step
            tokens = step * self._setup.schedule.tokens_per_step
            self._file.append(kind, step, tokens, values, note)

    def note(self, text: str) -> None:
        """A sentence for the person who watches."""
        self.append("note", {}, text)

    def step(self, result: StepResult, seconds: float) -> None:
        """The step that has just been counted, and where time went since the last such record."""
        config, schedule, progress = self._setup.config, self._setup.schedule, self._progress
        if progress.step % config.train.log_every_steps and progress.step != schedule.num_steps:
            return
        step, tokens = progress.step - 1, schedule.tokens_per_step
        values = {
            "train/loss": result.loss,
            "train/learning_rate": schedule.learning_rate(step),
            "train/grad_norm": result.grad_norm,
            "train/tokens_per_second": tokens / seconds,
            "train/phase": schedule.phase_index(step),
            "train/skipped_steps": progress.skipped,
            "train/damaged_shards": len(progress.exclusions.damaged),
            "train/seconds_waiting_for_data": self._setup.feed.waited,
        }
        self.append("train", values)
        length = schedule.phase(step).sequence_length
        by_rank = result.signals[2:]
        self.append("speed", speed(config, seconds, tokens, length, self._clock.take(), by_rank))

    def statistics(self) -> None:
        """What the quantizers of all ranks measured in this step, if it was one of those."""
        statistics, device = self._setup.trainable.precision.statistics, self._setup.device
        found = statistics.collect(lambda own: summed_by_name(own, device))
        if found:
            self.append("statistics", {f"quant/{name}": value for name, value in found.items()})

    def memory(self) -> None:
        """What this rank's memory holds."""
        setup = self._setup
        self.append("memory", memory(setup.trainable, setup.optimizer, setup.device))

    def close(self) -> None:
        if self._file:
            self._file.close()
