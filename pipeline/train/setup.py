"""What a worker's training is made of, built once from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.config import Config
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset, open_corpus
from pipeline.data.stream import MixtureStream
from pipeline.lineage import Lineage, lineage_of, schedule_of
from pipeline.runs import RunFolder
from pipeline.train.build import build_mixture
from pipeline.train.feed import Feed
from pipeline.train.optim import build_optimizer
from pipeline.train.parallel import Rank
from pipeline.train.schedule import Schedule
from pipeline.train.trainable import Trainable, build_trainable
from pipeline.warm_start import WarmStart, warm_start_of


@dataclass(frozen=True)
class Setup:
    """Which parts there are does not change while training goes on; what they hold does.

    lineage, warm_start: where a run that does not begin with fresh weights takes its own from.
    """

    config: Config
    run: RunFolder
    rank: Rank
    device: torch.device
    dataset: Dataset
    schedule: Schedule
    mixture: Mixture
    feed: Feed
    trainable: Trainable
    optimizer: torch.optim.Optimizer
    lineage: Lineage | None
    warm_start: WarmStart | None

    @staticmethod
    def of(config: Config, run: RunFolder, dataset_folder: Path, device: str) -> Setup:
        """Raises `ConfigError` and `ValueError` for what cannot be built."""
        rank, on = Rank.current(), torch.device(device)
        dataset = open_corpus(config.data, dataset_folder)
        schedule = schedule_of(config, run)
        mixture = build_mixture(config, schedule, dataset)
        stream = MixtureStream(
            dataset,
            mixture,
            schedule.unit_length,
            across_documents=config.data.across_documents,
        )
        feed = Feed(stream, schedule, config.train.micro_batch, rank, config.data, on)
        trainable = build_trainable(config, on)
        trainable.precision.statistics.every = config.train.statistics_every_steps
        optimizer = build_optimizer(trainable.model, config.train)
        optimizer.register_step_post_hook(trainable.changed)
        return Setup(
            config=config,
            run=run,
            rank=rank,
            device=on,
            dataset=dataset,
            schedule=schedule,
            mixture=mixture,
            feed=feed,
            trainable=trainable,
            optimizer=optimizer,
            lineage=lineage_of(run),
            warm_start=warm_start_of(run),
        )
