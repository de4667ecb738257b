"""Whole training runs in this process: a model and a corpus so small that a step takes moments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from pipeline.config import (
    ClusterConfig,
    Config,
    DataConfig,
    EvalsConfig,
    ModelSection,
    PhaseConfig,
    PrecisionConfig,
    SourceConfig,
    TokenizerConfig,
    TrackingConfig,
    TrainConfig,
)
from pipeline.lineage import fork, write_lineage
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from pipeline.train.loop import Trainer
from pipeline.train.metrics import final_records
from tests.data.corpora import VOCAB_SIZE, document, write_corpus

LENGTH, GLOBAL_BATCH, MICRO_BATCH = 16, 4, 2
STEP_TOKENS = LENGTH * GLOBAL_BATCH
EVEN = {"code": 0.5, "prose": 0.5}
STABLE = (PhaseConfig(blend=EVEN),)


def corpus(folder: Path) -> Path:
    """Two sources of some 700 and 500 units, in shards of 10 documents."""
    documents = [document(7 * i, 30 + (11 * i) % 90) for i in range(240)]
    return write_corpus(
        folder,
        {"code": documents[:140], "prose": documents[140:]},
        holdout=[document(3, 40), document(50, 60)],
        documents_per_shard=10,
    )


def configuration(
    root: Path, steps: int, data: dict[str, Any] | None = None, **train: Any
) -> Config:
    """A run of so many steps in NVFP4, with a checkpoint after every second one."""
    settings = {
        "tokens": steps * STEP_TOKENS,
        "sequence_length": LENGTH,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "phases": STABLE,
        "learning_rate": 3e-3,
        "final_learning_rate": 3e-5,
        "warmup_tokens": 2 * STEP_TOKENS,
        "validation_tokens": 64,
        "checkpoint_every_tokens": 2 * STEP_TOKENS,
        "keep_checkpoints": 100,
    }
    sources = {name: SourceConfig(builtin=name) for name in ("code", "prose")}
    return Config(
        root=str(root),
        stages=("train",),
        seed=5,
        model=ModelSection("M-*", VOCAB_SIZE, 32, 64, 2, 1, 16, 2, 16, 16, 1, mamba_chunk_size=16),
        precision=PrecisionConfig("nvfp4"),
        data=DataConfig(
            "tiny", sources, TokenizerConfig(VOCAB_SIZE), mixture_block=8, **data or {}
        ),
        train=TrainConfig(**{**settings, **train}),
        evals=EvalsConfig(),
        tracking=TrackingConfig(offline=True),
        cluster=ClusterConfig(),
    )


def start(config: Config, name: str) -> RunFolder:
    """A fresh run's folder below the root, with its lineage, as the command line makes it."""
    run = RunFolder(Path(config.root) / name)
    run.path.mkdir(parents=True)
    if config.train.fork_from:
        write_lineage(run, fork(config))
    run.config.write_text(yaml.safe_dump(config.to_dict()))
    return run


def train(config: Config, run: RunFolder, dataset: Path) -> Trainer:
    """Train to the end, from the newest checkpoint where there is one."""
    trainer = Trainer(config, run, dataset, "cpu")
    trainer.fit()
    return trainer


def train_until(config: Config, run: RunFolder, dataset: Path, step: int) -> None:
    """Train, and stop after `step` steps with a checkpoint, as a request to stop does."""
    trainer = Trainer(config, run, dataset, "cpu")
    own = trainer.signals.own
    trainer.signals.own = lambda: (1.0, 0.0) if trainer.progress.step + 1 == step else own()  # type: ignore
    assert trainer.fit()["stopped"]
    assert trainer.progress.step == step


def tensors_of(run: RunFolder, step: int | None = None) -> dict[str, Tensor]:
    """Weights and optimizer state of the last checkpoint, or of that step's."""
    found = (
        checkpoint.latest(run.checkpoints)
        if step is None
        else checkpoint.at_step(run.checkpoints, step)
    )
    assert found is not None
    return {
        f"{group}/{name}": tensor
        for group in ("model", "optimizer")
        for name, tensor in found.tensors(group).items()
    }


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def curve_of(run: RunFolder, first_step: int = 1) -> list[tuple[str, int, dict[str, float]]]:
    """What was logged from a step on, but for times and speeds."""
    return [
        (
            record["kind"],
            record["step"],
            {k: v for k, v in record["metrics"].items() if "second" not in k},
        )
        for record in final_records(run.metrics)
        if record["kind"] in {"train", "validation", "statistics"} and record["step"] >= first_step
    ]


def state_of(run: RunFolder, step: int) -> dict[str, Any]:
    """What is no tensor in the checkpoint of a step."""
    path = run.checkpoints / f"step-{step:08d}" / checkpoint.STATE
    return json.loads(path.read_text())


def with_data(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def with_train(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))
