"""With the reproducible reduction a run is one trajectory, to the bit, on any number of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.config import ClusterConfig, Config
from pipeline.runs import RunFolder
from tests.train.ranks import run_on_ranks
from tests.train.tiny import (
    LENGTH,
    configuration,
    corpus,
    curve_of,
    same_bits,
    start,
    tensors_of,
    train,
    train_until,
)

STEPS, SIZES, BATCH = 6, (4, 2), 6  # on four ranks: one or two micro-batches each
pytestmark = pytest.mark.slow


def config_of(folder: Path, shard: int = 1) -> Config:
    config = configuration(
        folder,
        STEPS,
        tokens=STEPS * BATCH * LENGTH,
        global_batch=BATCH,
        micro_batch=1,
        reproducible=True,
        checkpoint_every_tokens=0,
    )
    return replace(config, cluster=ClusterConfig(shard=shard))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each size, and one that was done in parts by all of them."""
    folder = tmp_path_factory.mktemp("sizes")
    corpus(folder / "corpus")
    for name in ("on-1", "on-2", "on-4", "moved"):
        start(config_of(folder), name)
    for size in SIZES:
        run_on_ranks(on_this_size, size, folder)
    for name in ("on-1", "moved"):
        train(config_of(folder), RunFolder(folder / name), folder / "corpus")
    return folder


def on_this_size(folder: Path) -> None:
    """Train `on-<size>` to the end, and `moved` from where it stands for two steps more.

    Two ranks hold whole weights and then share one copy; four share one, and then two copies.
    """
    size = dist.get_world_size()
    alone, moved, until = {2: (1, 0, 4), 4: (0, 2, 2)}[size]
    train(config_of(folder, alone), RunFolder(folder / f"on-{size}"), folder / "corpus")
    train_until(config_of(folder, moved), RunFolder(folder / "moved"), folder / "corpus", until)


@pytest.mark.parametrize("name", ["on-2", "on-4", "moved"])
def test_weights_optimizer_and_everything_logged_are_those_of_one_worker(
    runs: Path, name: str
) -> None:
    alone, other = RunFolder(runs / "on-1"), RunFolder(runs / name)
    assert same_bits(tensors_of(alone), tensors_of(other))
    shares = [
        [record for record in curve_of(run) if record[0] != "statistics"] for run in (alone, other)
    ]
    assert shares[0] == shares[1]
