"""Three gloo processes: a hung collective names the rank, and replicas that part are found."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.train import checkpoint
from pipeline.train.checkpoint import latest
from pipeline.train.parallel import (
    Rank,
    differing_replicas,
    from_rank_0,
    gathered,
    summed_by_name,
)
from pipeline.train.saver import Saver
from pipeline.train.watchdog import EXIT_CODE, Watchdog, describe
from tests.train.ranks import kill, run_on_ranks, start_on_ranks

RANKS = 3
pytestmark = pytest.mark.slow


def test_a_hung_collective_ends_and_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    started = time.monotonic()
    ranks = start_on_ranks(hang, RANKS, tmp_path)
    for rank in ranks:
        rank.join(150)
    codes = [rank.exitcode for rank in ranks]
    kill(ranks)
    assert time.monotonic() - started < 150
    report = (tmp_path / "HANG.txt").read_text()
    assert "at the sums of step 5; waiting for rank 2 (last seen at the sums of step 4)" in report
    assert all(codes)  # the first one to give up takes all with it
    assert EXIT_CODE in codes
    assert any(report in file.read_text() for file in tmp_path.glob("stderr-*"))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of one group's processes, and what each rank found by the name of what it did."""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(everything, RANKS, folder)
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


Told = tuple[Path, list[dict[str, Any]]]


def test_one_flipped_bit_on_one_rank_is_found_on_all(told: Told) -> None:
    for rank in told[1]:
        assert rank["replicas"] == [[], [1]]


def test_rank_0_decides_and_all_learn_of_all(told: Told) -> None:
    for rank in told[1]:
        assert rank["share"] == ["zero", ["zero", "one", "two"]]


def test_sums_by_name_are_of_all_ranks_also_where_one_has_nothing(told: Told) -> None:
    for rank in told[1]:
        assert rank["by_name"] == [{"b": [0 + 1, 10 + 10], "a": [5 + 5, 1 + 2]}, {}]


def test_a_part_that_cannot_be_written_fails_the_save_on_every_rank_and_only_that_one(
    told: Told,
) -> None:
    folder, ranks = told
    for rank in ranks:
        assert rank["save"] == [True, True]
    found = latest(folder / "checkpoints")
    assert found is not None
    assert found.step == 2
    assert torch.equal(found.tensors("model")["w"], torch.arange(9.0))


def test_a_wait_without_a_culprit_says_so() -> None:
    posts = {0: (7, "the sums of step 5"), 1: (7, "the sums of step 5")}
    assert "no rank in particular" in describe(posts, 12.0)


def hang(folder: Path) -> None:
    rank = Rank.current()
    sys.stderr = (folder / f"stderr-{rank.index}").open("w")
    with Watchdog(rank, 3.0, folder / "HANG.txt") as watchdog:
        for step in range(4, 6):
            if rank.index == 2 and step == 5:
                time.sleep(20)
                return
            watchdog.reached(f"the sums of step {step}")
            dist.all_reduce(torch.ones(1))


def everything(folder: Path) -> None:
    """On every rank of one group."""
    found = {
        "replicas": replicas(),
        "share": share(),
        "by_name": by_name(),
        "save": save(folder / "checkpoints"),
    }
    (folder / f"{Rank.current().index}.json").write_text(json.dumps(found))


def replicas() -> list[list[int]]:
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(15.0).view(3, 5))
        model.bias.zero_()
    before = differing_replicas(model)
    if Rank.current().index == 1:
        model.weight.detach().view(torch.int32)[2, 4] ^= 1
    return [before, differing_replicas(model)]


def share() -> list[Any]:
    word = ("zero", "one", "two")[Rank.current().index]
    return [from_rank_0(word), gathered(word)]


def by_name() -> list[dict[str, list[float]]]:
    rank, cpu = Rank.current().index, torch.device("cpu")
    own = {"b": torch.tensor([rank, 10.0]).double(), "a": torch.tensor([5, rank + 1.0]).double()}
    sums = summed_by_name(own if rank < 2 else {}, cpu)
    nothing = summed_by_name({}, cpu)
    return [{name: pair.tolist() for name, pair in found.items()} for found in (sums, nothing)]


def save(folder: Path) -> list[bool]:
    rank = Rank.current()
    saver = Saver(folder, rank, "attempt", lambda saved: None)
    dist.barrier()
    groups = {"model": {"w": torch.arange(9.0)}}
    if rank.index == 2:
        _save_on_a_full_disk(saver, groups)
    else:
        saver.save(1, groups, {})
    failed = saver.settle() != ""
    saver.save(2, groups, {})
    return [failed, saver.settle() == ""]


def _save_on_a_full_disk(saver: Saver, groups: dict[str, dict[str, torch.Tensor]]) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    real, checkpoint.save_file = checkpoint.save_file, full
    saver.save(1, groups, {})
    saver._part_ended.wait()
    checkpoint.save_file = real
