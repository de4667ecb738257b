"""When a checkpoint is written, what happens when it cannot be, and which ones stay."""

from __future__ import annotations

import secrets

from pipeline.train import checkpoint
from pipeline.train.checkpoint import Checkpoint, CheckpointError
from pipeline.train.clock import Clock
from pipeline.train.guards import require_equal_replicas, require_finite_weights
from pipeline.train.optim import optimizer_tensors
from pipeline.train.parallel import from_rank_0
from pipeline.train.progress import Progress
from pipeline.train.records import Records
from pipeline.train.saver import Saver
from pipeline.train.setup import Setup
from pipeline.train.watchdog import Watchdog


class Keeper:
    """A run's checkpoints, on every rank.

    Attributes:
        failed: saves that have failed in a row.
    """

    def __init__(
        self, setup: Setup, progress: Progress, records: Records, clock: Clock, watchdog: Watchdog
    ) -> None:
        self._setup, self._progress, self._records = setup, progress, records
        self._clock, self._watchdog = clock, watchdog
        self.failed = 0
        attempt = from_rank_0(secrets.token_hex(4))
        self._saver = Saver(setup.run.checkpoints, setup.rank, attempt, self._stands)

    def due(self) -> bool:
        """Whether one is due after the steps done: at boundaries, at the end, and in between."""
        step, schedule = self._progress.step, self._setup.schedule
        every = self._setup.config.train.checkpoint_every_tokens
        return (
            step == schedule.num_steps
            or step in schedule.boundaries()
            or schedule.crosses(step, every)
        )

    def save(self) -> None:
        """Start writing a checkpoint of the present step."""
        setup, step = self._setup, self._progress.step
        require_finite_weights(setup.trainable, step)
        require_equal_replicas(setup.trainable, step)
        self._clock.enter("checkpoint")
        self.settle()
        model = setup.trainable.model
        groups = {
            "model": checkpoint.model_tensors(model),
            "optimizer": optimizer_tensors(model, setup.optimizer),
        }
        self._saver.save(step, groups, self._progress.state(setup))
        self._records.memory()
        self._clock.enter("other")

    def settle(self) -> None:
        """Wait for the checkpoint under way; too many failures in a row end the run."""
        step, most = self._progress.step, self._setup.config.train.max_checkpoint_failures
        self._watchdog.reached(f"the checkpoint at step {step}")
        error = self._saver.settle()
        if not error:
            self.failed = 0
            return
        self.failed += 1
        self._records.note(f"step {step}: {error}")
        if self.failed >= most:
            raise CheckpointError(
                f"step {step}: {self.failed} checkpoints in a row could not be written "
                f"(train.max_checkpoint_failures={most}); {error}"
            )

    def finish(self) -> None:
        """Wait for the last one. Raises `CheckpointError` if it does not stand."""
        self.settle()
        if self.failed:
            raise CheckpointError(
                f"step {self._progress.step}: the last checkpoint could not be written; make room "
                "and resume the run"
            )

    def _stands(self, saved: Checkpoint) -> None:
        """Rank 0, in the saver's thread: remove checkpoints that are not kept."""
        train, schedule = self._setup.config.train, self._setup.schedule
        boundaries = schedule.boundaries()
        checkpoint.prune(
            saved,
            train.keep_checkpoints,
            lambda step: (
                step in boundaries or schedule.crosses(step, train.keep_checkpoints_every_tokens)
            ),
        )
