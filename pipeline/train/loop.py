"""The training loop of one worker: the same code in one process, on two CPUs or on a cluster.

Ray Train launches it; state is ours. Everything that the next step depends on is in the checkpoint:
weights, optimizer, the step (which gives the next unit of the mixture and the rounding keys), the
window of past losses, what was left out, and the fingerprints of data, schedule and recipe, which
must agree before a run goes on.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.config import AROUND_A_RUN, Config, ConfigError, PermanentError, differences
from pipeline.data.shards import DataError, open_corpus
from pipeline.data.stream import Batch, MixtureStream
from pipeline.lineage import lineage_of, schedule_of
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from pipeline.train.build import build_mixture
from pipeline.train.checkpoint import Checkpoint, CheckpointError
from pipeline.train.clock import Clock, memory, speed
from pipeline.train.diagnosis import layers_at_fault, source_mix
from pipeline.train.exclusions import Exclusions
from pipeline.train.feed import Feed
from pipeline.train.metrics import MetricsFile
from pipeline.train.optim import (
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    sharded_state_rows,
)
from pipeline.train.parallel import Rank, all_reduce, differing_replicas, from_rank_0, local
from pipeline.train.profiling import ProfiledSteps
from pipeline.train.saver import Saver
from pipeline.train.spikes import SpikeWindow
from pipeline.train.step import MicroBatches, StepResult, train_step
from pipeline.train.stopping import requested
from pipeline.train.trainable import build_trainable
from pipeline.train.validation import validate
from pipeline.train.watchdog import Watchdog
from pipeline.warm_start import load_weights, warm_start_of
from quant.policy import summary

OPTIMIZER_CONSTANTS = ("weight_decay", "beta1", "beta2", "epsilon", "clip_norm", "reproducible")
PREEMPTION_SECONDS = 5.0  # between two questions whether a node is being taken away


class TooManySkippedStepsError(PermanentError):
    """More steps were skipped than `train.max_skipped_steps` allows: a permanent failure."""


class ReplicasDifferError(RuntimeError):
    """Ranks no longer hold the same weights. Starting again from a checkpoint may help."""


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
        self.config, self.run, self.train = config, run, config.train
        self.rank = Rank.current()
        self.device = torch.device(device)
        self.dataset = open_corpus(config.data, dataset_folder)
        self.lineage = lineage_of(run)
        self.warm_start = warm_start_of(run)
        self.schedule = schedule_of(config, run)
        self.mixture = build_mixture(config, self.schedule, self.dataset)
        self.stream = MixtureStream(
            self.dataset,
            self.mixture,
            self.schedule.unit_length,
            across_documents=config.data.across_documents,
        )
        self.feed = Feed(
            self.stream,
            self.schedule,
            self.train.micro_batch,
            self.rank,
            config.data,
            self.device,
        )
        self.trainable = build_trainable(config, self.device)
        self.model, self.precision = self.trainable.model, self.trainable.precision
        self.recipe = self.precision.recipe
        self.precision.statistics.every = config.train.statistics_every_steps
        self.optimizer = build_optimizer(self.model, config.train)
        self.optimizer.register_step_post_hook(self.trainable.changed)
        self.token_bytes = self.dataset.token_bytes()
        self.window = SpikeWindow(config.train.spike_window, config.train.spike_threshold)
        self.exclusions = Exclusions()
        self.step = 0
        self.skipped = 0
        self.failed_saves = 0  # in a row
        self.validation: dict[str, float] = {}
        self.metrics = MetricsFile(run.metrics) if self.rank.index == 0 else None
        self.clock, self._seconds_to_sums = Clock(self.device), 0.0
        profiled = config.train.profile_steps if self.rank.index == 0 else ()
        self.profiled = ProfiledSteps(profiled, run.profile)
        self.watchdog = Watchdog(self.rank, config.train.hang_timeout_seconds, run.hang)
        attempt = from_rank_0(secrets.token_hex(4))
        self.saver = Saver(run.checkpoints, self.rank, attempt, self._checkpoint_stands)
        self._preempted, self._asked_at = preempted, time.monotonic()

    def fit(self) -> dict[str, Any]:
        """Train to the end, resuming from the newest complete checkpoint. Returns a summary.

        `stopped` in it tells that someone asked the run to stop before the end; a checkpoint of
        the step it stopped at is written then.
        """
        with self.watchdog:
            self._restore()
            self._append("start", {"start/ranks": self.rank.size})
            if self.device.type == "cuda":  # which kernels run is this card's to say
                tokens = self.train.micro_batch * self.train.sequence_length
                self._note(f"precision: {summary(self.precision.table(num_tokens=tokens))}")
            if self.trainable.gathered_as_values:
                self._note(f"gathered as values, not codes: {self.trainable.gathered_as_values}")
            stopped = self._run_steps()
            self._settle()
            if self.failed_saves:
                raise CheckpointError(
                    f"step {self.step}: the last checkpoint could not be written; make room and "
                    "resume the run"
                )
        if self.metrics:
            self.metrics.close()
        return {
            "stopped": stopped,
            "steps": self.step,
            "tokens": self.step * self.schedule.tokens_per_step,
            "skipped_steps": self.skipped,
            "validation": self.validation,
        }

    # ---- Steps ----------------------------------------------------------------------------------

    def _run_steps(self) -> bool:
        """All steps that are left; whether they were cut short by a request."""
        self.clock.enter("data")
        for batches in self.feed.steps(self.step, self.exclusions.skip):
            self.clock.enter("other")
            self._leave_out(self.feed.damaged(batches))
            if self.step in self.schedule.boundaries():
                self.window.clear()
            stop = notice = False
            if self.step in self.exclusions.skip:
                self._note(f"step {self.step}: left out, as data.skip asks")
                self.step += 1
            else:
                self.profiled.before(self.step)
                result, seconds = self._timed_step(batches)
                self.profiled.after(self.step)
                stop, notice = (signal > 0 for signal in result.signals[:2])
                notice = notice and self._preempted is not None and self._preempted()
                self.step += 1
                self._log_step(result, seconds)
            self._after_step(save_now=stop or notice)
            if stop:
                return self.step < self.schedule.num_steps
            self.clock.enter("data")
        return False

    def _timed_step(self, batches: list[Batch]) -> tuple[StepResult, float]:
        started = time.perf_counter()
        step, size = self.step, self.train.micro_batch
        self.precision.mode = self.schedule.phase(step).precision
        first = step * self.schedule.global_batch
        micro_batches: list[tuple[int | None, Batch]] = [
            ((batch.first_unit - first) // size, self._on_device(batch)) for batch in batches
        ]
        if self.trainable.weights is not None:  # each gather is all ranks' work
            fillers = self.feed.fillers(step, len(batches))
            micro_batches += [(None, self._moved(batch)) for batch in fillers]
        self.trainable.prepare()

        def before_sums() -> None:
            self.watchdog.reached(f"the sums of step {step}")
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the sums would wait for it anyway
            self._seconds_to_sums = time.perf_counter() - started

        result = train_step(
            self.model,
            self.precision,
            self.optimizer,
            micro_batches,
            step=step,
            learning_rate=self.schedule.learning_rate(step),
            clip_norm=self.train.clip_norm,
            judge=self.window.judge,
            signals=(*self._signals(), *self._own_seconds()),
            reduction=self.trainable.reduction,
            before_sums=before_sums,
            enter=self.clock.enter,
        )
        self.window.add(result.loss, result.grad_norm)
        if result.skipped:
            self._skipped(result, micro_batches)
        return result, time.perf_counter() - started

    def _leave_out(self, damaged: frozenset[str]) -> None:
        """Stop at damaged shards, with the state saved, or go on without them, as configured."""
        damaged -= self.exclusions.blocked(self.step)
        if not damaged:
            return
        names = ", ".join(sorted(damaged))
        if self.config.data.on_corrupt == "stop":
            self._save()
            self._settle()
            raise DataError(
                f"step {self.step}: {names} in {self.dataset.place} cannot be read or is not what "
                "the manifest describes; the run is saved at this step. Restore the shard and "
                "resume, or go on without its rows: data.on_corrupt=skip"
            )
        self.exclusions = self.exclusions.with_damaged(damaged, self.step)
        self._note(f"step {self.step}: {names} is damaged and left out from here on")

    def _own_seconds(self) -> list[float]:
        """This rank's time to the sums of the step before, in its place among all ranks."""
        own = [0.0] * self.rank.size
        own[self.rank.index] = self._seconds_to_sums
        return own

    def _signals(self) -> tuple[float, float]:
        """Rank 0's: whether to stop after this step, and whether to ask for preemption."""
        if self.rank.index:
            return 0.0, 0.0
        due = self._preempted is not None and (
            time.monotonic() - self._asked_at > PREEMPTION_SECONDS
        )
        if due:
            self._asked_at = time.monotonic()
        return float(requested(self.run.stop)), float(due)

    def _skipped(self, result: StepResult, micro_batches: MicroBatches) -> None:
        """Count a skipped step; too many are a permanent failure."""
        self.skipped += 1
        self._note(f"step {self.step}: skipped, {result.skipped}")
        if self.skipped <= self.train.max_skipped_steps:
            return
        layers = layers_at_fault(
            self.model, self.precision, micro_batches, self.step, self.trainable.reduction
        )
        phase = self.schedule.phase(self.step)
        raise TooManySkippedStepsError(
            f"step {self.step}: {self.skipped} steps were skipped, more than "
            f"train.max_skipped_steps={self.train.max_skipped_steps}; this one for "
            f"{result.skipped}. Phase {self.schedule.phase_index(self.step) + 1} of "
            f"{len(self.schedule.phases)} ({phase.precision}, learning rate "
            f"{self.schedule.learning_rate(self.step):.3g}), "
            f"{source_mix(self.mixture.names, micro_batches)}. {layers}. Look at the learning rate "
            f"and at the data: pipeline data at run={self.run.id} step={self.step}"
        )

    def _on_device(self, batch: Batch) -> Batch:
        return self._moved(self.stream.without_shards(batch, self.exclusions.blocked(self.step)))

    def _moved(self, batch: Batch) -> Batch:
        moved = {
            name: getattr(batch, name).to(self.device, non_blocking=True)
            for name in ("tokens_BT", "labels_BT", "seq_idx_BT")
        }
        return dataclasses.replace(batch, **moved)

    def _after_step(self, *, save_now: bool) -> None:
        statistics = self.precision.statistics.collect()
        if statistics:
            named = {f"quant/{name}": value for name, value in statistics.items()}
            self._append("statistics", named)
        last = self.step == self.schedule.num_steps
        if last or self._is_due(self.step, self.train.validate_every_tokens):
            self._require_finite_weights()
            self._validate()
            self.watchdog.reached(f"the validation after step {self.step}")
        every = self.train.compare_replicas_every_steps
        if every and self.step % every == 0:
            self._compare_replicas()
        if (
            save_now
            or last
            or self.step in self.schedule.boundaries()
            or self._is_due(self.step, self.train.checkpoint_every_tokens)
        ):
            self._save()

    def _is_due(self, step: int, every_tokens: int) -> bool:
        """Whether the step before `step` crossed a multiple of `every_tokens` (0: never)."""
        if not every_tokens:
            return False
        tokens = step * self.schedule.tokens_per_step
        return tokens // every_tokens > (tokens - self.schedule.tokens_per_step) // every_tokens

    def _validate(self) -> None:
        self.clock.enter("validation")
        values = validate(self.trainable, self.dataset, self.token_bytes, self.train)
        self.validation = {label: values[f"loss_{label}"] for label in ("recipe", "bf16")}
        self._append("validation", {f"validation/{name}": v for name, v in values.items()})
        self.clock.enter("other")

    # ---- Records --------------------------------------------------------------------------------

    def _log_step(self, result: StepResult, seconds: float) -> None:
        if self.step % self.train.log_every_steps:
            return
        step = self.step - 1
        values = {
            "train/loss": result.loss,
            "train/learning_rate": self.schedule.learning_rate(step),
            "train/grad_norm": result.grad_norm,
            "train/tokens_per_second": self.schedule.tokens_per_step / seconds,
            "train/phase": self.schedule.phase_index(step),
            "train/skipped_steps": self.skipped,
            "train/damaged_shards": len(self.exclusions.damaged),
            "train/seconds_waiting_for_data": self.feed.waited,
        }
        self._append("train", values)
        length = self.schedule.phase(step).sequence_length
        tokens, kinds = self.schedule.tokens_per_step, self.clock.take()
        by_rank = result.signals[2:]
        self._append("speed", speed(self.config, seconds, tokens, length, kinds, by_rank))

    def _append(self, kind: str, values: dict[str, float], note: str = "") -> None:
        if self.metrics:
            tokens = self.step * self.schedule.tokens_per_step
            self.metrics.append(kind, self.step, tokens, values, note)

    def _note(self, text: str) -> None:
        self._append("note", {}, text)

    # ---- State ----------------------------------------------------------------------------------

    def _identity(self, step: int) -> dict[str, Any]:
        """What must be the same for a checkpoint of `step` to be continued."""
        return {
            "data": self.dataset.content_hash,
            "tokenizer": self.dataset.manifest["tokenizer"]["sha256"],
            "across_documents": self.config.data.across_documents,
            "schedule": self.schedule.fingerprint(step),
            "order": self.mixture.fingerprint(step * self.schedule.global_batch),
            "recipe": self.recipe.fingerprint(self.train.micro_batch),
            "model": dataclasses.asdict(self.config.model),
            "seed": self.config.seed,
            "optimizer": [getattr(self.train, name) for name in OPTIMIZER_CONSTANTS],
        }

    def _state(self) -> dict[str, Any]:
        """All that a checkpoint holds beside tensors."""
        tracking = self.run.path / "tracking.json"
        return {
            "identity": self._identity(self.step),
            "skipped_steps": self.skipped,
            "validation": self.validation,
            "window": self.window.values,
            "exclusions": self.exclusions.to_dict(),
            "weight_dtype": str(self.model.compute_dtype).removeprefix("torch."),
            "lineage": self.lineage.to_dict() if self.lineage else None,
            "warm_start": self.warm_start.to_dict() if self.warm_start else None,
            "mlflow_run_id": json.loads(tracking.read_text())["run_id"]
            if tracking.is_file()
            else None,
            "config": self.config.to_dict(),
        }

    def _require_finite_weights(self) -> None:
        """No later step could be taken, and the checkpoint would displace a good one."""
        norm = torch.nn.utils.get_total_norm([local(p) for p in self.model.parameters()])
        if self.trainable.sharding.mesh is not None:
            all_reduce(norm, self.trainable.sharding.shards)
        if not torch.isfinite(norm):
            raise PermanentError(
                f"step {self.step}: the weights are no longer finite, training has diverged; lower "
                "train.learning_rate. Checkpoints written before stay in place"
            )

    def _compare_replicas(self) -> None:
        ranks = differing_replicas(self.model, self.trainable.sharding.replicas)
        if ranks:
            names = ", ".join(f"rank {rank}" for rank in ranks)
            raise ReplicasDifferError(
                f"step {self.step}: the weights of {names} differ from the other ranks'; a memory "
                "or network fault, or an operation that is not deterministic"
            )

    def _save(self) -> None:
        """Start writing a checkpoint of the present step."""
        self._require_finite_weights()
        self._compare_replicas()
        self.clock.enter("checkpoint")
        self._settle()
        groups = {
            "model": checkpoint.model_tensors(self.model),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
        }
        self.saver.save(self.step, groups, self._state())
        self._append("memory", memory(self.trainable, self.optimizer, self.device))
        self.clock.enter("other")

    def _settle(self) -> None:
        """Wait for the checkpoint under way; too many failures in a row end the run."""
        self.watchdog.reached(f"the checkpoint at step {self.step}")
        error = self.saver.settle()
        if not error:
            self.failed_saves = 0
            return
        self.failed_saves += 1
        self._note(f"step {self.step}: {error}")
        if self.failed_saves >= self.train.max_checkpoint_failures:
            raise CheckpointError(
                f"step {self.step}: {self.failed_saves} checkpoints in a row could not be written "
                f"(train.max_checkpoint_failures={self.train.max_checkpoint_failures}); {error}"
            )

    def _checkpoint_stands(self, saved: Checkpoint) -> None:
        """Rank 0, in the saver's thread: remove checkpoints that are not kept."""
        every, boundaries = self.train.keep_checkpoints_every_tokens, self.schedule.boundaries()
        checkpoint.prune(
            saved,
            self.train.keep_checkpoints,
            lambda step: step in boundaries or self._is_due(step, every),
        )

    def _restore(self) -> None:
        """Go on from the newest checkpoint, or from the parent's, or begin."""
        # Rank 0 finds it: storage may not show all ranks the same one.
        found = from_rank_0(
            checkpoint.latest(self.run.checkpoints) if not self.rank.index else None
        )
        if found is not None:
            self._check_identity(found)
            self._load(found)
        elif self.lineage:
            parent = Path(self.lineage.checkpoint)
            found = checkpoint.at_step(parent.parent, self.lineage.step)
            if found.state["identity"]["tokenizer"] != self._identity(self.step)["tokenizer"]:
                raise ConfigError(
                    f"train.fork_from={self.config.train.fork_from}: the corpus has another "
                    "tokenizer than the parent's, so its token ids mean other texts; name that one "
                    "with data.tokenizer.path"
                )
            self._load(found)
            self._save()  # from here on the child needs its parent no more
        else:
            self.exclusions = Exclusions().resumed(self.config.data, 0)
            if self.warm_start:
                load_weights(self.warm_start, self.model, self.dataset)

    def _load(self, found: Checkpoint) -> None:
        own, own_moments = checkpoint.sharded_rows(self.model), sharded_state_rows(self.model)
        checkpoint.load_model_tensors(self.model, found.tensors("model", own))
        moments = found.tensors("optimizer", own_moments)
        load_optimizer_tensors(self.model, self.optimizer, moments)
        self.trainable.changed()
        state = found.state
        self.step = found.step
        self.skipped = state["skipped_steps"]
        self.validation = state["validation"]
        self.window.values = [(loss, norm) for loss, norm in state["window"]]
        former = Exclusions.from_dict(state["exclusions"])
        fork_step = self.lineage.step if self.lineage else 0
        self.exclusions = former.resumed(self.config.data, self.step, fork_step=fork_step)

    def _check_identity(self, found: Checkpoint) -> None:
        """Raises `ConfigError` with what differs where the checkpoint is of another run."""
        then = found.state["identity"]
        differing = [key for key, value in self._identity(found.step).items() if then[key] != value]
        if not differing:
            return
        keys = differences(found.state["config"], self.config.to_dict(), AROUND_A_RUN)
        raise ConfigError(
            f"{found.path} cannot be continued: its {', '.join(differing)} differ from this "
            f"configuration's: {'; '.join(keys) or 'the corpus itself has changed'}. Restore the "
            "former settings, start a fresh run, or go on as a child: "
            f"train.fork_from={self.run.id}@{found.step}"
        )
