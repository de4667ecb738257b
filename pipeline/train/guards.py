"""What ends a run: weights or replicas that are no longer right, and too many skipped steps."""

from __future__ import annotations

import torch

from pipeline.config import PermanentError
from pipeline.train.diagnosis import layers_at_fault, source_mix
from pipeline.train.parallel import all_reduce, differing_replicas, local
from pipeline.train.progress import Progress
from pipeline.train.setup import Setup
from pipeline.train.step import MicroBatches, StepResult
from pipeline.train.trainable import Trainable


class TooManySkippedStepsError(PermanentError):
    """More steps were skipped than `train.max_skipped_steps` allows: a permanent failure."""


class ReplicasDifferError(RuntimeError):
    """Ranks no longer hold the same weights. Starting again from a checkpoint may help."""


def require_finite_weights(trainable: Trainable, step: int) -> None:
    """No later step could be taken, and a checkpoint would displace a good one."""
    norm = torch.nn.utils.get_total_norm([local(p) for p in trainable.model.parameters()])
    if trainable.sharding.mesh is not None:
        all_reduce(norm, trainable.sharding.shards)
    if not torch.isfinite(norm):
        raise PermanentError(
            f"step {step}: the weights are no longer finite, training has diverged; lower "
            "train.learning_rate. Checkpoints written before stay in place"
        )


def require_equal_replicas(trainable: Trainable, step: int) -> None:
    """Raises `ReplicasDifferError` with the ranks that have other weights than most."""
    ranks = differing_replicas(trainable.model, trainable.sharding.replicas)
    if ranks:
        names = ", ".join(f"rank {rank}" for rank in ranks)
        raise ReplicasDifferError(
            f"step {step}: the weights of {names} differ from the other ranks'; a memory "
            "or network fault, or an operation that is not deterministic"
        )


def require_few_skips(
    setup: Setup, progress: Progress, result: StepResult, micro_batches: MicroBatches
) -> None:
    """After a skipped step: raises `TooManySkippedStepsError` with what to look at."""
    train, schedule, step = setup.config.train, setup.schedule, progress.step
    if progress.skipped <= train.max_skipped_steps:
        return
    trainable = setup.trainable
    layers = layers_at_fault(
        trainable.model, trainable.precision, micro_batches, step, trainable.reduction
    )
    phase = schedule.phase(step)
    raise TooManySkippedStepsError(
        f"step {step}: {progress.skipped} steps were skipped, more than "
        f"train.max_skipped_steps={train.max_skipped_steps}; this one for {result.skipped}. "
        f"Phase {schedule.phase_index(step) + 1} of {len(schedule.phases)} ({phase.precision}, "
        f"learning rate {schedule.learning_rate(step):.3g}), "
        f"{source_mix(setup.mixture.names, micro_batches)}. {layers}. Look at the learning rate "
        f"and at the data: pipeline data at run={setup.run.id} step={step}"
    )
