"""The training loop of one worker: the same code in one process, on two CPUs or on a cluster.

Ray Train launches it; state is ours. Everything that the next step depends on is in the checkpoint:
weights, optimizer, and what `Progress` holds. What a run is made of is `Setup`'s, what it writes
down is `Records`', when and how checkpoints are written is `Keeper`'s; here is the order of things.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Config
from pipeline.data.shards import DataError
from pipeline.data.stream import Batch
from pipeline.runs import RunFolder
from pipeline.train.clock import Clock
from pipeline.train.guards import (
    require_equal_replicas,
    require_few_skips,
    require_finite_weights,
)
from pipeline.train.keeper import Keeper
from pipeline.train.profiling import ProfiledSteps
from pipeline.train.progress import Progress
from pipeline.train.records import Records
from pipeline.train.setup import Setup
from pipeline.train.spikes import SpikeWindow
from pipeline.train.step import MicroBatches, StepResult, train_step
from pipeline.train.stopping import StopSignals
from pipeline.train.validation import validate
from pipeline.train.watchdog import Watchdog
from quant.policy import summary


class Trainer:
    """One worker's training: build, restore, run to the end of the schedule.

    `preempted` tells whether a node is about to be taken away; every rank asks it together.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        dataset_folder: Path,
        device: str,
        preempted: Callable[[], bool] | None = None,
    ) -> None:
        self.train = config.train
        self.setup = Setup.of(config, run, dataset_folder, device)
        window = SpikeWindow(self.train.spike_window, self.train.spike_threshold)
        self.progress = Progress(window)
        self.clock, self.seconds_to_sums = Clock(self.setup.device), 0.0
        self.records = Records(self.setup, self.progress, self.clock)
        rank = self.setup.rank
        self.watchdog = Watchdog(rank, self.train.hang_timeout_seconds, run.hang)
        self.keeper = Keeper(self.setup, self.progress, self.records, self.clock, self.watchdog)
        self.signals = StopSignals(rank, run.stop, preempted)
        profiled = self.train.profile_steps if rank.index == 0 else ()
        self.profiled = ProfiledSteps(profiled, run.profile)
        self.token_bytes = self.setup.dataset.token_bytes()

    def fit(self) -> dict[str, Any]:
        """Train to the end, resuming from the newest complete checkpoint. Returns a summary.

        `stopped` in it tells that someone asked the run to stop before the end; a checkpoint of
        the step it stopped at is written then.
        """
        with self.watchdog:
            self._begin()
            stopped = self._run_steps()
            self.profiled.close()
            self.keeper.finish()
        self.records.close()
        return {
            "stopped": stopped,
            "steps": self.progress.step,
            "tokens": self.progress.step * self.setup.schedule.tokens_per_step,
            "skipped_steps": self.progress.skipped,
            "validation": self.progress.validation,
        }

    def _begin(self) -> None:
        """Restore what there is, and say what trains."""
        if self.progress.restore(self.setup, self.records.note):
            self.keeper.save()  # from here on the child needs its parent no more
        self.records.append("start", {"start/ranks": self.setup.rank.size})
        trainable = self.setup.trainable
        if self.setup.device.type == "cuda":  # which kernels run is this card's to say
            tokens = self.train.micro_batch * self.train.sequence_length
            table = trainable.precision.table(num_tokens=tokens)
            self.records.note(f"precision: {summary(table)}")
        if trainable.gathered_as_values:
            self.records.note(f"gathered as values, not codes: {trainable.gathered_as_values}")

    def _run_steps(self) -> bool:
        """All steps that are left; whether they were cut short by a request."""
        feed, progress, schedule = self.setup.feed, self.progress, self.setup.schedule
        self.clock.enter("data")
        for batches in feed.steps(progress.step, progress.exclusions.skip):
            self.clock.enter("other")
            self._leave_out(feed.damaged(batches))
            if progress.step in schedule.boundaries():
                progress.window.clear()
            stop = save_now = False
            if progress.step in progress.exclusions.skip:
                self.records.note(f"step {progress.step}: left out, as data.skip asks")
                progress.step += 1
            else:
                self.profiled.before(progress.step)
                result, seconds = self._timed_step(batches)
                self.profiled.after(progress.step)
                stop, save_now = self.signals.heard(result.signals)
                progress.step += 1
                self.records.step(result, seconds)
            self._after_step(save_now=save_now)
            if stop:
                return progress.step < schedule.num_steps
            self.clock.enter("data")
        return False

    def _timed_step(self, batches: list[Batch]) -> tuple[StepResult, float]:
        started = time.perf_counter()
        trainable, schedule, step = self.setup.trainable, self.setup.schedule, self.progress.step
        trainable.precision.mode = schedule.phase(step).precision
        micro_batches = self._micro_batches(batches)
        trainable.prepare()

        def before_sums() -> None:
            self.watchdog.reached(f"the sums of step {step}")
            if self.setup.device.type == "cuda":
                torch.cuda.synchronize()  # the sums would wait for it anyway
            self.seconds_to_sums = time.perf_counter() - started

        result = train_step(
            trainable.model,
            trainable.precision,
            self.setup.optimizer,
            micro_batches,
            step=step,
            learning_rate=schedule.learning_rate(step),
            clip_norm=self.train.clip_norm,
            judge=self.progress.window.judge,
            signals=(*self.signals.own(), *self._own_seconds()),
            reduction=trainable.reduction,
            before_sums=before_sums,
            enter=self.clock.enter,
        )
        self.progress.window.add(result.loss, result.grad_norm)
        if result.skipped:
            self.progress.skipped += 1
            self.records.note(f"step {step}: skipped, {result.skipped}")
            require_few_skips(self.setup, self.progress, result, micro_batches)
        return result, time.perf_counter() - started

    def _micro_batches(self, batches: list[Batch]) -> MicroBatches:
        """The step's batches by number and on the device, filled up where all must keep step."""
        step = self.progress.step
        first, size = step * self.setup.schedule.global_batch, self.train.micro_batch
        own: list[tuple[int | None, Batch]] = [
            ((batch.first_unit - first) // size, self._on_device(batch)) for batch in batches
        ]
        if self.setup.trainable.weights is not None:  # each gather is all ranks' work
            fillers = self.setup.feed.fillers(step, len(batches))
            own += [(None, self._moved(batch)) for batch in fillers]
        return own

    def _leave_out(self, damaged: frozenset[str]) -> None:
        """Stop at damaged shards, with the state saved, or go on without them, as configured."""
        step, exclusions = self.progress.step, self.progress.exclusions
        damaged -= exclusions.blocked(step)
        if not damaged:
            return
        names = ", ".join(sorted(damaged))
        if self.setup.config.data.on_corrupt == "stop":
            self.keeper.save()
            self.keeper.finish()
            raise DataError(
                f"step {step}: {names} in {self.setup.dataset.place} cannot be read or is not what "
                "the manifest describes; the run is saved at this step. Restore the shard and "
                "resume, or go on without its rows: data.on_corrupt=skip"
            )
        self.progress.exclusions = exclusions.with_damaged(damaged, step)
        self.records.note(f"step {step}: {names} is damaged and left out from here on")

    def _own_seconds(self) -> list[float]:
        """This rank's time to the sums of the step before, in its place among all ranks."""
        own = [0.0] * self.setup.rank.size
        own[self.setup.rank.index] = self.seconds_to_sums
        return own

    def _on_device(self, batch: Batch) -> Batch:
        blocked = self.progress.exclusions.blocked(self.progress.step)
        return self._moved(self.setup.feed.stream.without_shards(batch, blocked))

    def _moved(self, batch: Batch) -> Batch:
        moved = {
            name: getattr(batch, name).to(self.setup.device, non_blocking=True)
            for name in ("tokens_BT", "labels_BT", "seq_idx_BT")
        }
        return dataclasses.replace(batch, **moved)

    def _after_step(self, *, save_now: bool) -> None:
        """What is due between two steps."""
        schedule, step = self.setup.schedule, self.progress.step
        self.records.statistics()
        last = step == schedule.num_steps
        if last or schedule.crosses(step, self.train.validate_every_tokens):
            require_finite_weights(self.setup.trainable, step)
            self._validate()
            self.watchdog.reached(f"the validation after step {step}")
        every = self.train.compare_replicas_every_steps
        if every and step % every == 0:
            require_equal_replicas(self.setup.trainable, step)
        if save_now or self.keeper.due():
            self.keeper.save()

    def _validate(self) -> None:
        self.clock.enter("validation")
        values = validate(self.setup.trainable, self.setup.dataset, self.token_bytes, self.train)
        self.progress.validation = {label: values[f"loss_{label}"] for label in ("recipe", "bf16")}
        self.records.append("validation", {f"validation/{n}": v for n, v in values.items()})
        self.clock.enter("other")
