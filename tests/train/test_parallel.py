"""Two gloo processes: a hung collective names the rank, and replicas that part are found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.train import checkpoint
from pipeline.train.checkpoint import latest
from pipeline.train.parallel import Rank, differing_replicas, from_rank_0, gathered
from pipeline.train.saver import Saver
from pipeline.train.watchdog import EXIT_CODE, Watchdog, describe

RANKS = 3
pytestmark = pytest.mark.slow


def run(scenario: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run `scenario` below on every rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.train.test_parallel", scenario, str(folder)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    done = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def test_a_hung_collective_ends_and_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    started = time.monotonic()
    ranks = run("hang", tmp_path)
    assert time.monotonic() - started < 150
    report = (tmp_path / "HANG.txt").read_text()
    assert "at the sums of step 5; waiting for rank 2 (last seen at the sums of step 4)" in report
    assert all(rank.returncode for rank in ranks)  # the first one to give up takes all with it
    assert EXIT_CODE in {rank.returncode for rank in ranks}
    assert any(report in rank.stderr for rank in ranks)


def test_one_flipped_bit_on_one_rank_is_found_on_all(tmp_path: Path) -> None:
    for rank in run("replicas", tmp_path):
        assert rank.stdout.split() == ["[]", "[1]"], rank.stderr


def test_rank_0_decides_and_all_learn_of_all(tmp_path: Path) -> None:
    for rank in run("share", tmp_path):
        assert rank.stdout.strip() == "zero ['zero', 'one', 'two']", rank.stderr


def test_a_part_that_cannot_be_written_fails_the_save_on_every_rank_and_only_that_one(
    tmp_path: Path,
) -> None:
    for rank in run("save", tmp_path):
        assert rank.stdout.split("|")[:2] == ["True", "True"], rank.stderr
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert torch.equal(found.tensors("model")["w"], torch.arange(9.0))


def test_a_wait_without_a_culprit_says_so() -> None:
    posts = {0: (7, "the sums of step 5"), 1: (7, "the sums of step 5")}
    assert "no rank in particular" in describe(posts, 12.0)


def hang(folder: Path) -> None:
    rank = Rank.current()
    with Watchdog(rank, 3.0, folder / "HANG.txt") as watchdog:
        for step in range(4, 6):
            if rank.index == 2 and step == 5:
                time.sleep(20)
                return
            watchdog.reached(f"the sums of step {step}")
            dist.all_reduce(torch.ones(1))


def replicas(folder: Path) -> None:
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(15.0).view(3, 5))
        model.bias.zero_()
    print(differing_replicas(model))
    if Rank.current().index == 1:
        model.weight.detach().view(torch.int32)[2, 4] ^= 1
    print(differing_replicas(model))


def share(folder: Path) -> None:
    word = ("zero", "one", "two")[Rank.current().index]
    print(from_rank_0(word), gathered(word))


def save(folder: Path) -> None:
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
    print(failed, saver.settle() == "", sep="|", end="|")


def _save_on_a_full_disk(saver: Saver, groups: dict[str, dict[str, torch.Tensor]]) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    real, checkpoint.save_file = checkpoint.save_file, full
    saver.save(1, groups, {})
    saver._part_ended.wait()
    checkpoint.save_file = real


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[2]}/.rendezvous-{sys.argv[1]}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    {"hang": hang, "replicas": replicas, "share": share, "save": save}[sys.argv[1]](
        Path(sys.argv[2])
    )
    if sys.argv[1] != "hang":
        dist.barrier()
    dist.destroy_process_group()
