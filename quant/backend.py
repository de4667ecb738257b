"""Which implementation runs the quantizers on CPU tensors: the compiled kernels or plain torch.

Both give the same bytes. The choice is global to the process, for tests and benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from kernels import cpu

Backend = Literal["auto", "reference", "cpu"]
_current: Backend = "auto"


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Run the quantizers on one implementation inside a `with` block.

    Args:
        name: "auto" takes the compiled kernels where they could be built (the default),
            "reference" plain torch, "cpu" the compiled kernels or an error.

    Raises:
        ValueError: an unknown name, or "cpu" on a machine where the kernels cannot be built.
    """
    global _current
    if name not in ("auto", "reference", "cpu"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'cpu', not {name!r}")
    if name == "cpu" and not cpu.available():
        raise ValueError(f"the CPU kernels are not available: {cpu.reason()}")
    previous, _current = _current, name
    try:
        yield
    finally:
        _current = previous


def use_compiled(x: Tensor) -> bool:
    """Whether the compiled CPU kernels are to run on `x`."""
    return _current != "reference" and x.device.type == "cpu" and cpu.available()
