"""What a rank reads: the units of each step, and its batches of them, read ahead and watched."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

import torch

from pipeline.config import DataConfig
from pipeline.data.chunks import Request
from pipeline.data.stream import Batch, MixtureStream, empty_batch
from pipeline.train.parallel import Rank, all_reduce, gathered
from pipeline.train.schedule import Schedule


class WrongUnitsError(RuntimeError):
    """The stream gave other units than those that were due."""


def requests_of(schedule: Schedule, micro_batch: int, rank: Rank, step: int) -> list[Request]:
    """A rank's micro-batches of a step: where they begin in the plan, in ascending order.

    A pure function, in which a restart or another number of ranks has nothing to continue.
    """
    first, length = step * schedule.global_batch, schedule.phase(step).sequence_length
    return [
        (first + index * micro_batch, micro_batch, length)
        for index in rank.micro_batches(schedule.global_batch // micro_batch)
    ]


class Feed:
    """This rank's batches, step by step.

    pin: in page-locked memory. `waited` is how many seconds the latest step waited for its batches.
    """

    def __init__(
        self,
        stream: MixtureStream,
        schedule: Schedule,
        micro_batch: int,
        rank: Rank,
        data: DataConfig,
        device: torch.device,
    ) -> None:
        self.stream, self.schedule, self.micro_batch = stream, schedule, micro_batch
        self.rank, self.data, self.device = rank, data, device
        self.waited = 0.0

    def steps(self, first_step: int, skip: Collection[int]) -> Iterator[list[Batch]]:
        """The micro-batches of each step from `first_step` on; none for a step to skip.

        Raises `WrongUnitsError` unless they are the very units that the plan has there.
        """
        steps = range(first_step, self.schedule.num_steps)
        requests = (
            request for step in steps if step not in skip for request in self._requests(step)
        )
        batches = self.stream.iterate(
            requests,
            prefetch_bytes=self.data.prefetch_bytes,
            executor=self.data.executor,
            pin=self.device.type == "cuda",
        )
        for step in steps:
            due = [] if step in skip else self._requests(step)
            began = time.perf_counter()
            found = [next(batches) for _ in due]
            self.waited = time.perf_counter() - began
            for batch, (first, count, _) in zip(found, due, strict=True):
                if (batch.first_unit, batch.num_units) != (first, count):
                    raise WrongUnitsError(
                        f"step {step}: {batch.num_units} units from {batch.first_unit} on came "
                        f"where {count} from {first} on were due"
                    )
            yield found

    def fillers(self, step: int, owned: int) -> list[Batch]:
        """Empty batches that give this rank, which owns so many, as many as any other."""
        rounds = -(-self.schedule.global_batch // (self.micro_batch * self.rank.size))
        length = self.schedule.phase(step).sequence_length
        return [empty_batch(self.micro_batch, length)] * (rounds - owned)

    def damaged(self, batches: list[Batch]) -> frozenset[str]:
        """The damaged shards that the step's batches met on any rank. Every rank asks together."""
        own = frozenset[str]().union(*(batch.damaged for batch in batches))
        met = torch.tensor(float(bool(own)), device=self.device)
        all_reduce(met)
        return own.union(*gathered(own)) if met else own

    def _requests(self, step: int) -> list[Request]:
        return requests_of(self.schedule, self.micro_batch, self.rank, step)
