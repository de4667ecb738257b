"""Which implementation runs the quantizers: compiled kernels (CPU), Triton's (CUDA) or plain torch.

All give the same bytes. The choice is global to the process, for tests and benchmarks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from kernels import cpu, dispatch

log = logging.getLogger(__name__)

Backend = Literal["auto", "reference", "cpu", "triton"]
_current: Backend = "auto"


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Run the quantizers on one implementation inside a `with` block.

    Args:
        name: "auto" takes the compiled kernels where they could be built, and Triton's on a GPU
            that they are written for (the default), "reference" plain torch, "cpu" the compiled
            kernels or an error, "triton" Triton's kernels or an error.

    Raises:
        ValueError: an unknown name, "cpu" on a machine where the kernels cannot be built, or
            "triton" where it is not installed.
    """
    global _current
    if name not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, not {name!r}")
    if name == "triton" and (why := dispatch.triton_missing()):
        raise ValueError(f"backend 'triton' is not available: {why}")
    if name == "cpu" and not cpu.available():
        raise ValueError(f"the CPU kernels are not available: {cpu.reason()}")
    previous, _current = _current, name
    try:
        yield
    finally:
        _current = previous


def use_compiled(x: Tensor) -> bool:
    """Whether the compiled CPU kernels are to run on `x`."""
    return _current in ("auto", "cpu") and x.device.type == "cpu" and cpu.available()


def use_triton(x: Tensor) -> bool:
    """Whether Triton's kernels are to run on `x`, where they take it."""
    if _current == "auto":
        return x.device.type == "cuda" and _triton_runs_on(x.device)
    return _current == "triton"


@functools.cache
def _triton_runs_on(device: torch.device) -> bool:
    why = dispatch.describe(device).without_triton
    if why is not None:
        log.warning("quantizers run in plain torch on %s: %s", device, why)
    return why is None
