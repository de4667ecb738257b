"""An all-reduce over all cards, twice: whether its sums have one order."""

from __future__ import annotations

import tempfile

import torch
from torch import distributed, multiprocessing

from kernels.burnin.verdicts import CheckError

ELEMENTS = 1 << 22


def reduce_twice() -> str:
    """All ranks' sums, equal to the bit between two runs.

    Raises:
        CheckError: they are not.
    """
    ranks = torch.cuda.device_count()
    with tempfile.NamedTemporaryFile() as store:
        multiprocessing.spawn(_rank, (ranks, store.name + ".store"), nprocs=ranks)  # type: ignore[no-untyped-call]
    return f"all-reduce of {ELEMENTS:,} FP32 over {ranks} cards"


def _rank(rank: int, ranks: int, store: str) -> None:
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    generator = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(ELEMENTS, device="cuda", generator=generator)
    sums = []
    for _ in range(2):
        total = x.clone()
        distributed.all_reduce(total)
        sums.append(total)
    distributed.destroy_process_group()
    if not torch.equal(*sums):
        raise CheckError("two all-reduces of the same tensors differ: fix NCCL_ALGO and NCCL_PROTO")
