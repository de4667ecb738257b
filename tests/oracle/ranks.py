"""A path walked by several processes, each with its share of every global batch.

    python -m tests.oracle.ranks FOLDER     on every rank, with RANK and WORLD_SIZE set

walks all of ``WALKS`` and leaves the rank's witnesses in FOLDER, a file each. Walking them in one
set of processes spares the seconds that each start takes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.train import parallel, reduction
from pipeline.train import step as train
from pipeline.train.parallel import Group, Rank
from quant import Precision
from tests.oracle.paths import Path, walk
from tests.oracle.step import MicroBatch, Step
from tests.oracle.witness import Witness

# Ranks that are wrong in one way each


@contextmanager
def keyed_by_local_index() -> Iterator[None]:
    """Random bits follow the micro-batch's position on its rank."""
    real = Precision.begin

    def begin(precision: Precision, step: int, microbatch: int) -> None:
        real(precision, step, microbatch // Rank.current().size)

    with mock.patch.object(Precision, "begin", begin):
        yield


@contextmanager
def one_gradient_left_out() -> Iterator[None]:
    """Rank 1 keeps its own gradient of one parameter."""
    real = parallel.reduce_gradients

    def reduce(gradients: list[Tensor], group: Group) -> None:
        own = gradients[5].clone()
        real(gradients, group)
        if Rank.current().index == 1:
            gradients[5].copy_(own)

    with mock.patch.object(reduction, "reduce_gradients", reduce):
        yield


@contextmanager
def norm_of_local_gradients() -> Iterator[None]:
    """Each rank clips by the norm of what it had before the sum."""
    norm, real, local = torch.nn.utils.get_total_norm, parallel.reduce_gradients, []

    def reduce(gradients: list[Tensor], group: Group) -> None:
        local.append(norm(gradients))
        real(gradients, group)

    def local_norm(gradients: list[Tensor]) -> Tensor:
        return local[-1]

    with (
        mock.patch.object(reduction, "reduce_gradients", reduce),
        mock.patch.object(torch.nn.utils, "get_total_norm", local_norm),
    ):
        yield


@contextmanager
def mean_over_ranks() -> Iterator[None]:
    """Gradients are averaged, although the loss is divided by the global count already."""
    real = parallel.reduce_gradients

    def reduce(gradients: list[Tensor], group: Group) -> None:
        real(gradients, group)
        for gradient in gradients:
            gradient /= Rank.current().size

    with mock.patch.object(reduction, "reduce_gradients", reduce):
        yield


@contextmanager
def divided_by_local_count() -> Iterator[None]:
    """Each rank divides its loss by its own valid tokens."""

    def all_reduce(tensor: Tensor) -> None:
        if tensor.is_floating_point():  # counts of tokens are not
            parallel.all_reduce(tensor)

    with mock.patch.object(train, "all_reduce", all_reduce):
        yield


# What is walked


@dataclass(frozen=True)
class Walk:
    """``path``'s micro-batches are those of the global batch; ``change`` spoils the code."""

    path: Path
    change: Callable[[], AbstractContextManager[Any]] = nullcontext


SPOILED = Path(row_length=20, micro_batches=(0, 1, 2), modes=("recipe",))
WALKS = {
    2: {
        "the paper's recipe": Walk(Path(micro_batches=(0, 1, 2, 3))),
        "MXFP8, 40 tokens, recomputed": Walk(
            Path("nvfp4", row_length=20, micro_batches=(0, 1, 2), checkpointing="full")
        ),
        "late switch": Walk(Path(micro_batches=(0, 1), modes=("recipe", "bf16_forward"))),
        **{
            change.__name__: Walk(SPOILED, change)
            for change in (
                keyed_by_local_index,
                one_gradient_left_out,
                norm_of_local_gradients,
                mean_over_ranks,
                divided_by_local_count,
            )
        },
    },
    3: {
        "the paper's recipe": Walk(Path(micro_batches=(0, 1, 2, 3))),
        "a rank without a micro-batch": Walk(Path("nvfp4", micro_batches=(0, 1))),
    },
}
"""By the number of ranks."""


def walk_on_ranks(ranks: int, folder: FilePath) -> dict[str, list[tuple[Step, list[Witness]]]]:
    """All walks of so many processes: for each step the global batch's, and all witnesses."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.oracle.ranks", str(folder)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error
    return {
        name: [joined(seen) for seen in zip(*_walked(folder, name, ranks), strict=True)]
        for name in WALKS[ranks]
    }


def joined(seen: Sequence[tuple[Step, Witness]]) -> tuple[Step, list[Witness]]:
    """One step of all ranks as that of their global batch."""
    shares: list[list[MicroBatch]] = [list(step.micro_batches) for step, _ in seen]
    together = sorted((mb for share in shares for mb in share), key=lambda mb: mb.index)
    return replace(seen[0][0], micro_batches=together), [witness for _, witness in seen]


def _walked(folder: FilePath, name: str, ranks: int) -> list[list[tuple[Step, Witness]]]:
    files = [folder / f"{name}-{rank}.pickle" for rank in range(ranks)]
    return [pickle.loads(file.read_bytes()) for file in files]


def _walk_share(folder: FilePath) -> None:
    rank = Rank.current()
    for name, walk_ in WALKS[rank.size].items():
        indices = walk_.path.micro_batches
        share = tuple(indices[i] for i in rank.micro_batches(len(indices)))
        with walk_.change():
            seen = walk(replace(walk_.path, micro_batches=share))
        (folder / f"{name}-{rank.index}.pickle").write_bytes(pickle.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[1]}/.rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    _walk_share(FilePath(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
