"""With the reproducible reduction a run is one trajectory, to the bit, on any number of workers."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from pipeline.config import ClusterConfig, Config
from pipeline.data.stream import Batch
from pipeline.runs import RunFolder
from pipeline.train.loop import Trainer
from pipeline.train.metrics import read_records
from pipeline.train.step import StepResult
from tests.train.ranks import TIMEOUT, kill, run_on_ranks, start_on_ranks
from tests.train.tiny import (
    LENGTH,
    configuration,
    corpus,
    curve_of,
    same_bits,
    start,
    tensors_of,
    train,
)

STEPS, BATCH, INTERVAL = 9, 6, 2  # six micro-batches a step: not for every size equally many
ELASTIC = ((4, 2, 2), (2, 0, 4), (3, 2, 6), (4, 1, None))
"""Of the run that is killed: on how many ranks, in rows of how many (0, or no divisor: all), killed
when that step is done."""
pytestmark = pytest.mark.slow


def config_of(folder: Path, shard: int = 1) -> Config:
    config = configuration(
        folder,
        STEPS,
        tokens=STEPS * BATCH * LENGTH,
        global_batch=BATCH,
        micro_batch=1,
        reproducible=True,
        statistics_every_steps=4,
        checkpoint_every_tokens=INTERVAL * BATCH * LENGTH,
    )
    return replace(config, cluster=ClusterConfig(shard=shard))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed runs of one, two and four ranks, and one that all of them did in parts."""
    folder = tmp_path_factory.mktemp("sizes")
    corpus(folder / "corpus")
    for name in ("on-1", "on-2", "on-4", "elastic"):
        start(config_of(folder), name)
    train(config_of(folder), RunFolder(folder / "on-1"), folder / "corpus")
    run_on_ranks(on_whole_copies, 2, folder)
    run_on_ranks(on_one_copy, 4, folder)
    for part, (ranks, _, until) in enumerate(ELASTIC):
        (folder / "part").write_text(str(part))
        processes = start_on_ranks(elastic_part, ranks, folder)
        deadline = time.monotonic() + TIMEOUT
        while any(process.is_alive() for process in processes):
            assert time.monotonic() < deadline
            if until is not None and last_step(folder) >= until:
                break
            time.sleep(0.02)
        finished = [process.exitcode == 0 for process in processes]
        kill(processes)
        assert all(finished) == (until is None)
    return folder


def on_whole_copies(folder: Path) -> None:
    train(config_of(folder, 1), RunFolder(folder / "on-2"), folder / "corpus")


def on_one_copy(folder: Path) -> None:
    train(config_of(folder, 0), RunFolder(folder / "on-4"), folder / "corpus")


def elastic_part(folder: Path) -> None:
    """Go on with the run that is killed, and note which units each step saw."""
    part, timed = int((folder / "part").read_text()), Trainer._timed_step
    seen = folder / f"seen-{part}-{dist.get_rank()}.jsonl"

    def noted(trainer: Trainer, batches: list[Batch]) -> tuple[StepResult, float]:
        result = timed(trainer, batches)
        units = [batch.first_unit for batch in batches]
        with seen.open("a") as file:
            file.write(json.dumps([trainer.progress.step, units]) + "\n")
        return result

    config = config_of(folder, ELASTIC[part][1])
    with mock.patch.object(Trainer, "_timed_step", noted):
        train(config, RunFolder(folder / "elastic"), folder / "corpus")


def last_step(folder: Path) -> int:
    records = read_records(RunFolder(folder / "elastic").metrics)
    return max((item["step"] for item, _ in records if item["kind"] == "train"), default=0)


def logged(run: RunFolder) -> list[tuple[str, int, dict[str, float]]]:
    """All of it but statistics of weights, which are not taken of codes that are gathered."""
    return [
        (kind, step, {name: v for name, v in values.items() if "weight/" not in name})
        for kind, step, values in curve_of(run)
    ]


@pytest.mark.parametrize("name", ["on-2", "on-4", "elastic"])
def test_weights_optimizer_and_everything_logged_are_those_of_one_worker(
    runs: Path, name: str
) -> None:
    alone, other = RunFolder(runs / "on-1"), RunFolder(runs / name)
    assert same_bits(tensors_of(alone), tensors_of(other))
    assert logged(alone) == logged(other)
    kinds = {kind for kind, *_ in logged(other)}
    assert kinds == {"train", "validation", "statistics"}


def test_killed_and_resized_each_planned_unit_is_consumed_once(runs: Path) -> None:
    """Of the steps that count: those done again after a kill displace what was done before."""
    starts = [
        item
        for item, _ in read_records(RunFolder(runs / "elastic").metrics)
        if item["kind"] == "start"
    ]
    assert [item["metrics"]["start/ranks"] for item in starts] == [size for size, *_ in ELASTIC]
    bounds = [item["step"] for item in starts] + [STEPS]
    assert bounds == sorted(bounds)
    consumed: Counter[int] = Counter()
    for part, (size, *_) in enumerate(ELASTIC):
        files = sorted(runs.glob(f"seen-{part}-*"))
        assert len(files) == size
        for step, units in (json.loads(x) for file in files for x in file.read_text().splitlines()):
            if bounds[part] <= step < bounds[part + 1]:
                consumed.update(units)
    assert consumed == Counter(range(STEPS * BATCH))
