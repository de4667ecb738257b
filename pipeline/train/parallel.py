"""Data-parallel ranks: who computes what, sums over all of them, and whether they still agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Value = TypeVar("Value")
Group = dist.ProcessGroup | None  # None: all ranks


@dataclass(frozen=True)
class Rank:
    """This worker's place among the data-parallel ranks."""

    index: int = 0
    size: int = 1

    @staticmethod
    def current() -> Rank:
        if dist.is_initialized():
            return Rank(dist.get_rank(), dist.get_world_size())
        return Rank()

    def micro_batches(self, count: int) -> range:
        """Indices within the global batch that this rank computes; equal data on any size."""
        return range(self.index, count, self.size)


def several(group: Group = None) -> bool:
    """Whether there are other ranks."""
    return dist.is_initialized() and dist.get_world_size(group) > 1


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, not a copy; another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(tensor: Tensor) -> slice:
    """Which rows of the whole this rank holds: a ceiling's share each, the last ranks fewer."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor) if tensor.ndim else 0)
    mesh, rows = tensor.device_mesh, len(tensor)
    each = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * each, rows)
    return slice(start, min(start + each, rows))


def all_reduce(tensor: Tensor, group: Group = None, op: Any = dist.ReduceOp.SUM) -> None:
    """Sum (or another `op`) over ranks, in place."""
    if several(group):
        dist.all_reduce(tensor, op, group)


def reduce_gradients(gradients: list[Tensor], group: Group = None) -> None:
    """Sum gradients of one dtype over ranks, as one flat buffer."""
    if not several(group):
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def summed_by_name(own: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Sums over ranks of FP64 pairs on `device`. Their names are rank 0's; a rank may have none."""
    names = from_rank_0(list(own))
    if not names or not several():
        return own
    nothing = torch.zeros(2, dtype=torch.float64, device=device)
    sums = torch.stack([own.get(name, nothing) for name in names])
    all_reduce(sums)
    return dict(zip(names, sums, strict=True))


def from_rank_0(value: Value) -> Value:
    """Rank 0's value, on every rank."""
    if not several():
        return value
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def gathered(value: Value) -> list[Value]:
    """Every rank's value, on every rank."""
    if not several():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def differing_replicas(model: nn.Module, replicas: Group = None) -> list[int]:
    """Ranks whose parameters are not the bits of most of their `replicas` (of the first one's,
    where two halves differ).

    A hash of each parameter is compared, so any flipped bit shows.
    """
    if not several(replicas):
        return []
    parts = [local(parameter.detach()) for parameter in model.parameters()]
    own = torch.stack([torch.hash_tensor(part) for part in parts if part.numel()])
    own = own.view(torch.int64)
    of_all = [torch.empty_like(own) for _ in range(dist.get_world_size(replicas))]
    dist.all_gather(of_all, own, replicas)
    hashes = [tuple(hashes.tolist()) for hashes in of_all]
    usual = max(hashes, key=hashes.count)
    differs = gathered(hashes[dist.get_rank(replicas)] != usual)
    return [rank for rank, differing in enumerate(differs) if differing]
