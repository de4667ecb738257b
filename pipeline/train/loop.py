"""The training loop of one worker: the same code in one process, on two CPUs or on a cluster.

Ray Train launches it; state is ours. Everything that the next step depends on is in the checkpoint:
weights, optimizer, the step (which gives the next unit of the mixture and the rounding keys), and
the fingerprints of data, schedule and recipe, which must agree before a run goes on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evals.domains import domain_loss
from model import HybridModel, ModelConfig
from pipeline.config import Config, ConfigError, PermanentError
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset
from pipeline.data.stream import Batch, MixtureStream, validation_rows
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from pipeline.train.metrics import MetricsFile
from pipeline.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from pipeline.train.schedule import Schedule
from pipeline.train.step import StepResult, train_step
from quant import Recipe, apply_recipe, named_recipe


@dataclass(frozen=True)
class Rank:
    """This worker's place among the data-parallel ranks."""

    index: int = 0
    size: int = 1

    @staticmethod
    def current() -> Rank:
        if dist.is_initialized():
            return Rank(dist.get_rank(), dist.get_world_size())
        return Rank()

    def micro_batches(self, count: int) -> range:
        """Indices within the global batch that this rank computes; equal data on any size."""
        return range(self.index, count, self.size)


OPTIMIZER_CONSTANTS = ("weight_decay", "beta1", "beta2", "epsilon", "clip_norm")


class TooManySkippedStepsError(PermanentError):
    """More steps were skipped than `train.max_skipped_steps` allows: a permanent failure."""


def build_model(config: Config, device: torch.device) -> HybridModel:
    """The freshly initialized model, the same for the same seed on any number of ranks."""
    shape = ModelConfig.from_dict(dataclasses.asdict(config.model))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    checkpointing: Any = config.train.activation_checkpointing
    return HybridModel(shape, dtype, checkpointing, config.seed).to(device)


def build_recipe(config: Config) -> Recipe:
    """The precision recipe with the configured BF16 blocks at both ends."""
    ends = (config.precision.first, config.precision.last)
    first, last = (end if 0 < end < 1 else int(end) for end in ends)
    return named_recipe(config.precision.recipe).with_blocks(first, last)


def build_mixture(config: Config, schedule: Schedule, dataset: Dataset) -> Mixture:
    """The plan that orders the dataset's units."""
    units = {name: dataset.num_units(name, schedule.unit_length) for name in dataset.sources}
    return Mixture(
        units, schedule.mixture_phases(), block=config.data.mixture_block, seed=config.data.seed
    )


class Trainer:
    """One worker's training: build, restore, run to the end of the schedule."""

    def __init__(self, config: Config, run: RunFolder, dataset_folder: Path, device: str) -> None:
        self.config, self.run, self.train = config, run, config.train
        self.rank = Rank.current()
        self.device = torch.device(device)
        self.dataset = Dataset.open(dataset_folder)
        self.schedule = Schedule.of(config.train, tuple(config.data.sources))
        self.mixture = build_mixture(config, self.schedule, self.dataset)
        self.stream = MixtureStream(self.dataset, self.mixture, self.schedule.unit_length)
        self.model = build_model(config, self.device)
        self.recipe = build_recipe(config)
        self.precision = apply_recipe(
            self.model, self.recipe, num_blocks=len(config.model.pattern), seed=config.seed
        )
        self.precision.statistics.every = config.train.statistics_every_steps
        self.optimizer = build_optimizer(self.model, config.train)
        self.token_bytes = self.dataset.token_bytes()
        self.step = 0
        self.skipped = 0
        self.validation: dict[str, float] = {}

    def fit(self) -> dict[str, Any]:
        """Train to the end, resuming from the newest complete checkpoint. Returns a summary."""
        self._restore()
        metrics = MetricsFile(self.run.metrics) if self.rank.index == 0 else None
        for batches in self._steps(self.step):
            result, seconds = self._timed_step(batches)
            self.step += 1
            if metrics and self.step % self.train.log_every_steps == 0:
                self._log_step(metrics, result, seconds)
            self._after_step(metrics)
        if metrics:
            metrics.close()
        return {
            "steps": self.step,
            "tokens": self.step * self.schedule.tokens_per_step,
            "skipped_steps": self.skipped,
            "validation": self.validation,
        }

    def _steps(self, first_step: int) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step, read ahead in the background."""
        size = self.train.micro_batch
        owned = self.rank.micro_batches(self.train.global_batch // size)
        steps = range(first_step, self.schedule.num_steps)
        requests = (
            (
                step * self.schedule.global_batch + index * size,
                size,
                self.schedule.phase(step).sequence_length,
            )
            for step in steps
            for index in owned
        )
        batches = self.stream.iterate(requests, executor=self.config.data.executor)
        for _ in steps:
            yield [next(batches) for _ in owned]

    def _timed_step(self, batches: list[Batch]) -> tuple[StepResult, float]:
        started = time.perf_counter()
        step, size = self.step, self.train.micro_batch
        self.precision.mode = self.schedule.phase(step).precision
        first = step * self.schedule.global_batch
        micro_batches = [
            ((batch.first_unit - first) // size, self._on_device(batch)) for batch in batches
        ]
        result = train_step(
            self.model,
            self.precision,
            self.optimizer,
            micro_batches,
            step=step,
            learning_rate=self.schedule.learning_rate(step),
            clip_norm=self.train.clip_norm,
        )
        if not result.taken:
            self.skipped += 1
            if self.skipped > self.train.max_skipped_steps:
                raise TooManySkippedStepsError(
                    f"step {step}: {self.skipped} steps were skipped (loss {result.loss}, gradient "
                    f"norm {result.grad_norm}, {result.nonfinite} non-finite quantizer inputs), "
                    f"more than train.max_skipped_steps={self.train.max_skipped_steps}; look at "
                    "the learning rate and at the data of these steps"
                )
        return result, time.perf_counter() - started

    def _on_device(self, batch: Batch) -> Batch:
        moved = {
            name: getattr(batch, name).to(self.device, non_blocking=True)
            for name in ("tokens_BT", "labels_BT", "seq_idx_BT")
        }
        return dataclasses.replace(batch, **moved)

    def _log_step(self, metrics: MetricsFile, result: StepResult, seconds: float) -> None:
        step = self.step - 1
        values = {
            "train/loss": result.loss,
            "train/learning_rate": self.schedule.learning_rate(step),
            "train/grad_norm": result.grad_norm,
            "train/tokens_per_second": self.schedule.tokens_per_step / seconds,
            "train/phase": self.schedule.phase_index(step),
            "train/skipped_steps": self.skipped,
        }
        self._append(metrics, "train", values)

    def _after_step(self, metrics: MetricsFile | None) -> None:
        statistics = self.precision.statistics.collect()
        if metrics and statistics:
            named = {f"quant/{name}": value for name, value in statistics.items()}
            self._append(metrics, "statistics", named)
        last = self.step == self.schedule.num_steps
        if last or self._is_due(self.train.validate_every_tokens):
            self._require_finite_weights()
            self._validate(metrics)
        if (
            last
            or self.step in self.schedule.boundaries()
            or self._is_due(self.train.checkpoint_every_tokens)
        ):
            self._save()

    def _is_due(self, every_tokens: int) -> bool:
        """Whether this step crossed a multiple of `every_tokens` (0: never)."""
        if not every_tokens:
            return False
        tokens = self.step * self.schedule.tokens_per_step
        return tokens // every_tokens > (tokens - self.schedule.tokens_per_step) // every_tokens

    def _validate(self, metrics: MetricsFile | None) -> None:
        """Held-out loss in the recipe's precision and in BF16, of each domain and of all tokens."""
        values = {}
        names = self.dataset.sources
        for label in ("recipe", "bf16"):
            nats, tokens = 0.0, 0
            with self.precision.override(label):
                for name in names:
                    rows = validation_rows(
                        self.dataset,
                        name,
                        self.train.sequence_length,
                        self.train.validation_tokens // len(names),
                    )
                    if not len(rows.tokens_BT):  # nothing of this source is held out
                        continue
                    domain = domain_loss(self.model, rows, self.token_bytes, self.train.micro_batch)
                    values[f"validation/{name}/loss_{label}"] = domain.loss
                    nats, tokens = nats + domain.nats_sum, tokens + domain.tokens
            values[f"validation/loss_{label}"] = nats / max(tokens, 1)
            self.validation[label] = values[f"validation/loss_{label}"]
        if metrics:
            self._append(metrics, "validation", values)

    def _append(self, metrics: MetricsFile, kind: str, values: dict[str, float]) -> None:
        metrics.append(kind, self.step, self.step * self.schedule.tokens_per_step, values)

    def _identity(self, step: int) -> dict[str, Any]:
        """What must be the same for a checkpoint of `step` to be continued."""
        return {
            "data": self.dataset.manifest["content_hash"],
            "schedule": self.schedule.fingerprint(step),
            "order": self.mixture.fingerprint(step * self.schedule.global_batch),
            "recipe": self.recipe.fingerprint(self.train.micro_batch),
            "model": dataclasses.asdict(self.config.model),
            "seed": self.config.seed,
            "optimizer": [getattr(self.train, name) for name in OPTIMIZER_CONSTANTS],
        }

    def _require_finite_weights(self) -> None:
        """No later step could be taken, and the checkpoint would displace a good one."""
        if not torch.isfinite(torch.nn.utils.get_total_norm(list(self.model.parameters()))):
            raise PermanentError(
                f"step {self.step}: the weights are no longer finite, training has diverged; lower "
                "train.learning_rate. Checkpoints written before stay in place"
            )

    def _save(self) -> None:
        self._require_finite_weights()
        if self.rank.index == 0:
            saved = checkpoint.save(
                self.run.checkpoints,
                self.step,
                {
                    "model": checkpoint.model_tensors(self.model),
                    "optimizer": optimizer_tensors(self.model, self.optimizer),
                },
                {
                    "identity": self._identity(self.step),
                    "skipped_steps": self.skipped,
                    "validation": self.validation,
                    "config": self.config.to_dict(),
                },
            )
            checkpoint.prune(saved, self.train.keep_checkpoints)
        if self.rank.size > 1:
            dist.barrier()

    def _agreed_checkpoint(self) -> checkpoint.Checkpoint | None:
        """The checkpoint that rank 0 finds: storage may not show all ranks the same one."""
        found = checkpoint.latest(self.run.checkpoints) if self.rank.index == 0 else None
        if self.rank.size > 1:
            shared = [found]
            dist.broadcast_object_list(shared)
            found = shared[0]
        return found

    def _restore(self) -> None:
        found = self._agreed_checkpoint()
        if found is None:
            return
        identity = self._identity(found.step)
        differing = [
            key for key, value in identity.items() if found.state["identity"][key] != value
        ]
        if differing:
            raise ConfigError(
                f"{found.path} cannot be continued: its {', '.join(differing)} differ from this "
                "configuration's; start a fresh run, or restore the former settings"
            )
        checkpoint.load_model_tensors(self.model, found.tensors("model"))
        load_optimizer_tensors(self.model, self.optimizer, found.tensors("optimizer"))
        self.step = found.step
        self.skipped = found.state["skipped_steps"]
        self.validation = found.state["validation"]
