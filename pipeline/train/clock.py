"""Where a rank's time goes, what its memory holds, and which rank the others wait for."""

from __future__ import annotations

import dataclasses
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model import ModelConfig
from model.counts import flops_per_token
from pipeline.config import Config
from pipeline.train.parallel import local
from pipeline.train.trainable import Trainable

KINDS = ("data", "forward", "backward", "sums", "optimizer", "validation", "checkpoint", "other")


class Clock:
    """Counts time as one of `KINDS` at a time: all of it, so that shares sum to 1.

    On a GPU by its own clock, from events in its stream: a wait of the host counts only where the
    GPU has nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._kind, self._since = "other", self._now()
        self._spans: list[tuple[str, Any, Any]] = []

    def enter(self, kind: str) -> None:
        """From now on time counts as `kind`."""
        assert kind in KINDS, kind
        now = self._now()
        self._spans.append((self._kind, self._since, now))
        self._kind, self._since = kind, now

    def take(self) -> dict[str, float]:
        """Seconds by kind since the last call."""
        self.enter(self._kind)
        if self._cuda:
            torch.cuda.synchronize()
        seconds: Counter[str] = Counter(dict.fromkeys(KINDS, 0.0))
        for kind, start, end in self._spans:
            seconds[kind] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        self._spans = []
        return dict(seconds)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def speed(
    config: Config,
    seconds: float,
    tokens: int,
    sequence_length: int,
    by_kind: dict[str, float],
    by_rank: Sequence[float],
) -> dict[str, float]:
    """How fast a step was, and what it waited for.

    Model FLOPs are those of `model.counts`, three times the forward pass; utilization is their
    share of the datasheet's dense BF16 peak of all devices, whatever precision multiplied.

    Args:
        seconds, tokens: of the step.
        by_kind: seconds since the last such record, by kind.
        by_rank: seconds until each rank had its gradients.
    """
    ranks, hardware = len(by_rank), config.cluster.hardware
    values = {"speed/tokens_per_second_per_device": tokens / seconds / ranks}
    if config.cluster.gpus_per_worker and hardware is not None:
        shape = ModelConfig.from_dict(dataclasses.asdict(config.model))
        flops = 3 * flops_per_token(shape, sequence_length)["total"] * tokens / seconds
        values["speed/mfu_of_bf16_peak"] = flops / (ranks * hardware.bf16_tflops * 1e12)
    whole = sum(by_kind.values()) or 1.0
    values |= {f"speed/share_{kind}": value / whole for kind, value in by_kind.items()}
    if ranks > 1:
        slowest = max(range(ranks), key=lambda rank: by_rank[rank])
        median = statistics.median(by_rank)
        values["speed/slowest_rank"] = slowest
        values["speed/slowest_over_median"] = by_rank[slowest] / median if median else 1.0
    return values


def memory(
    trainable: Trainable, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, float]:
    """Bytes on this rank: the peak since the last call, and what of it stays from step to step.

    The peak is of the GPU's allocator; on a CPU of the process, since its start.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "memory/peak": peak,
        "memory/weights": _bytes(list(trainable.model.parameters())),
        "memory/optimizer": _bytes([value for value in moments if isinstance(value, Tensor)]),
        "memory/quantized_weights": trainable.codes_nbytes,
        "memory/gradient_sums": trainable.reduction.nbytes,
    }


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(local(tensor.detach()).nbytes for tensor in tensors)
