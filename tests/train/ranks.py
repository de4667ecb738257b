"""Several gloo processes that each run a function of a test module.

They are forked from a server that has imported everything once, so that a start takes moments.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.train.tiny", "torch.distributed.fsdp", "torch._dynamo"])
TIMEOUT = 600.0

Function = Callable[[Path], None]


def start_on_ranks(function: Function, ranks: int, folder: Path) -> list[BaseProcess]:
    """Processes that each call `function(folder)` in one process group."""
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as meeting:
        pass  # a name that is free
    arguments = [(function, rank, ranks, folder, meeting) for rank in range(ranks)]
    processes: list[BaseProcess] = [
        CONTEXT.Process(target=_in_group, args=item, daemon=True) for item in arguments
    ]
    for process in processes:
        process.start()
    return processes


def run_on_ranks(function: Function, ranks: int, folder: Path) -> None:
    """Call `function(folder)` on all ranks. Fails where one of them does."""
    processes = start_on_ranks(function, ranks, folder)
    try:
        for process in processes:
            process.join(TIMEOUT)
        assert all(process.exitcode == 0 for process in processes), "see the ranks' output"
    finally:
        kill(processes)


def kill(processes: list[BaseProcess]) -> None:
    """SIGKILL, whatever they do."""
    for process in processes:
        process.kill()
        process.join()


def _in_group(function: Function, rank: int, ranks: int, folder: Path, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    function(folder)
    dist.barrier()
    dist.destroy_process_group()
