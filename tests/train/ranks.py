"""Several gloo processes that each run a function of a test module.

    python -m tests.train.ranks MODULE FUNCTION FOLDER      with RANK and WORLD_SIZE set

calls MODULE.FUNCTION(FOLDER) in a process group. One set of processes for many checks: each start
takes seconds.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def run_on_ranks(function: Callable[[Path], None], ranks: int, folder: Path) -> list[str]:
    """What each rank printed. Fails where one of them does."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [function.__module__, function.__name__, str(folder)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.train.ranks", *arguments],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [printed for printed, _ in outputs]


if __name__ == "__main__":
    module, name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/.rendezvous-{name}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    getattr(importlib.import_module(module), name)(Path(folder))
    dist.barrier()
    dist.destroy_process_group()
