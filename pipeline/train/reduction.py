"""Sums over micro-batches and ranks: as they come, or the same to the bit on any number of ranks.

Floating-point sums depend on their order, and the order on who computed which micro-batch. The
reproducible reduction adds integers instead: a micro-batch's gradient is rounded once, to whole
multiples of 2^-50, and 64-bit sums of those have one result in any order and on any number of
ranks. The exponent is a constant, so nothing is measured, remembered or done again. What is lost,
2^-51 a micro-batch, is 4e-8 of AdamW's usual epsilon, which stands beside the root of the second
moment in every update; what FP32 sums lose is more wherever a gradient exceeds 1e-8.

It costs 8 bytes a parameter for the sums, and reductions that move 8 bytes where FP32 moves 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from pipeline.train.parallel import Group, all_reduce, local, reduce_gradients

SCALE = 2.0**50  # a gradient's quantum is 1 / SCALE
LOSS_SCALE = 2.0**40  # FP64 sums of multiples of 2^-40 are exact up to 2^13
SUM_LIMIT = 2.0**12  # what all micro-batches together may reach; the 64 bits hold twice that


class Reduction:
    """Adds up one step's losses and gradients, in the order in which they come.

    replicas: the ranks that hold the same rows of each parameter, this one among them; None is all
        ranks. Their gradients are summed here; those of other rows of the same parameters were
        summed when the backward pass scattered them.
    shards: the ranks that together hold whole parameters; None where each rank holds all of them.
    scatter_each: whether gradients are scattered after each micro-batch. Else they are kept whole
        until the last: fewer bytes moved, and 4 bytes a parameter more on each rank.

    Attributes:
        loss: FP64 scalar, the losses so far.
        outside: int64 scalar, elements so far that no sum can hold.
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: Group = None,
        shards: Group = None,
        *,
        scatter_each: bool = True,
    ) -> None:
        self.model, self.replicas, self.shards = model, replicas, shards
        self._scatter_each = scatter_each
        self.begin()

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that stay from step to step."""
        return 0

    def begin(self) -> None:
        """A new step."""
        device = next(self.model.parameters()).device
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.outside = torch.zeros((), dtype=torch.int64, device=device)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run a micro-batch's backward pass and add what it gives; `last`: it is this rank's last.

        loss: the micro-batch's share of the global batch's mean loss, a scalar.
        """
        if isinstance(self.model, FSDPModule) and not self._scatter_each:
            self.model.set_requires_gradient_sync(last)
        loss.backward()
        self.loss += loss.detach()

    def finish(self) -> list[Tensor]:
        """Every parameter's FP32 gradient, summed over all ranks: whole, or this rank's rows.

        They are the parameters' own; zeros where there was no micro-batch.
        """
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        reduce_gradients(gradients, self.replicas)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """L2 norm of the gradients of all parameters, whole: FP32 scalar."""
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.shards is None:
            return norm
        squares = norm.square()
        all_reduce(squares, self.shards)
        return squares.sqrt()


class ReproducibleReduction(Reduction):
    """The same bits for the same global batch, whoever computed its micro-batches.

    num_micro_batches: those of the global batch. Each may give gradients up to SUM_LIMIT divided
        by that; an element beyond it, or one that is not finite, is counted in `outside`.
    """

    def __init__(
        self,
        model: nn.Module,
        num_micro_batches: int,
        replicas: Group = None,
        shards: Group = None,
    ) -> None:
        self.limit = SUM_LIMIT / num_micro_batches
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.last = False
        super().__init__(model, replicas, shards)

    @property
    def nbytes(self) -> int:
        """As `Reduction.nbytes`; what blocks sum up as they scatter goes with each step."""
        return sum(total.nbytes for total in self._sums.values())

    def begin(self) -> None:
        """A new step."""
        super().begin()
        for total in self._sums.values():
            total.zero_()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """As `Reduction.backward`."""
        self.last = last
        loss.backward()
        self.loss += (loss.detach().double() * LOSS_SCALE).round() / LOSS_SCALE
        if self.shards is not None:  # the scatter has added up, see ReproducibleScatter
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._sum_of(parameter).add_(self.fixed(parameter.grad))
                parameter.grad = None

    def fixed(self, gradient: Tensor) -> Tensor:
        """FP32 gradients in whole quanta, int64; overwrites them."""
        least, largest = torch.aminmax(gradient) if gradient.numel() else (self.loss, self.loss)
        inside = (least > -self.limit) & (largest < self.limit)  # not so where one is NaN
        self.outside += ~inside
        return gradient.mul_(SCALE).round_().to(torch.int64)

    def finish(self) -> list[Tensor]:
        """As `Reduction.finish`."""
        if self.shards is not None:
            return [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        parameters = list(self.model.parameters())
        totals = [self._sum_of(parameter) for parameter in parameters]
        reduce_gradients(totals, self.replicas)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = in_fp32(total)
        return [p.grad for p in parameters if p.grad is not None]

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.int64)
        return self._sums[parameter]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """As `Reduction.norm`; rows are summed by a fixed tree, and their sums as integers.

        Rows are never cut by sharding. The integers' exponent follows from the largest row, so the
        relative error is at most 2^-39 times the number of rows.
        """
        rows = torch.cat([_squares_of_rows(gradient) for gradient in gradients])
        largest = rows.max() if len(rows) else rows.sum()
        if self.shards is not None:
            all_reduce(largest, self.shards, dist.ReduceOp.MAX)
        scale = _power_of_two(38 - torch.frexp(largest)[1])
        total = (rows * scale).round_().to(torch.int64).sum()
        if self.shards is not None:
            all_reduce(total, self.shards)
        norm = (total.double() / scale).sqrt().float()
        return torch.where(torch.isfinite(largest), norm, torch.inf)


class ReproducibleScatter(ReduceScatter):
    """What FSDP2 calls to scatter the sums of one block's gradients, here as integers.

    They add up in it; the gradients that FSDP2 accumulates are zero until the step's last
    micro-batch, and are the whole sums then.
    """

    def __init__(self, reduction: ReproducibleReduction) -> None:
        self._reduction = reduction
        self._total: Tensor | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add one micro-batch of each rank of `group`; FP32 in and out."""
        part = output_tensor.new_empty(output_tensor.shape, dtype=torch.int64)
        dist.reduce_scatter_single(part, self._reduction.fixed(input_tensor), group=group)
        self._total = part if self._total is None else self._total.add_(part)
        if not self._reduction.last:
            output_tensor.zero_()
            return
        all_reduce(self._total, self._reduction.replicas)
        output_tensor.copy_(in_fp32(self._total))
        self._total = None


def in_fp32(total: Tensor) -> Tensor:
    """Sums of quanta as FP32 values, rounded to nearest."""
    return total.float().mul_(1 / SCALE)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in FP64, exact on every device: made of bits."""
    return ((exponent.long().clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def _squares_of_rows(gradient: Tensor) -> Tensor:
    """Each row's sum of squares [rows] in FP64; halves are added until one column is left."""
    if not gradient.numel():
        return gradient.new_zeros(0, dtype=torch.float64)
    x = gradient.reshape(len(gradient), -1).double().square_()
    while (width := x.shape[1]) > 1:
        half = (width + 1) // 2
        x[:, : width - half] += x[:, half:]
        x = x[:, :half]
    return x[:, 0]
