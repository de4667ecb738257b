"""Which kernel multiplies two quantized operands: one table, and the one function that reads it.

A row of `TABLE` is a kernel, the backend that it belongs to, and what keeps it from a problem. The
rows of the first backend that has any left are the candidates; a tune (`kernels.tune`) that has
measured this shape on this card picks the fastest, else the first is taken. So the choice is a pure
function of (device, problem, tune): it is tested without a GPU, printed, and logged with the
reason why rows above it were passed over. Nothing is tried to see whether it fails.

Legend: M, N rows of the operands, R the reduced dimension.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels import tune

log = logging.getLogger(__name__)

BACKENDS = ("blackwell", "emulated")
BLACKWELL = ((10, 0), (10, 3), (12, 0))
TRITON_TARGETS = ((9, 0), *BLACKWELL)

ELEMENT_BITS = {"nvfp4": 4, "mxfp4": 4, "mxfp8": 8}
"""The formats that kernels multiply as codes, and the size of an element."""

_ROW_BYTES = 16


@dataclass(frozen=True)
class Device:
    """What the choice needs to know of a device.

    Attributes:
        type: "cuda", "cpu" or "meta".
        capability: compute capability of a CUDA device.
        name: the card's name, under which a tune is stored.
        without_triton: why Triton's kernels cannot run here; None if they can.
    """

    type: str
    capability: tuple[int, int] | None = None
    name: str = ""
    without_triton: str | None = None


class Problem(NamedTuple):
    """One GEMM, `A @ B.T`.

    Attributes:
        formats: of A and B: "nvfp4", "mxfp4", "mxfp8", "bf16" or another name.
        rows, columns: M and N.
        depths: R of A and of B, which differ where tokens were padded differently.
    """

    formats: tuple[str, str]
    rows: int
    columns: int
    depths: tuple[int, int]

    def __str__(self) -> str:
        formats = " x ".join(dict.fromkeys(self.formats))
        return f"{formats} {self.rows} x {self.columns} x {min(self.depths)}"


@dataclass(frozen=True)
class Choice:
    """What runs a GEMM.

    Attributes:
        backend: "blackwell" or "emulated" (or "reference").
        kernel: a name in `TABLE`.
        tiling: index in `kernels.gemm.tilings`, for our own kernel.
        reason: why this one.
    """

    backend: str
    kernel: str
    reason: str = ""
    tiling: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table; `refusal` says what keeps the kernel from a problem, or None."""

    backend: str
    kernel: str
    refusal: Callable[[Device, Problem], str | None]


def sm(capability: tuple[int, int]) -> str:
    """What NVIDIA calls a compute capability."""
    return f"sm_{capability[0]}{capability[1]}"


def _blackwell(device: Device) -> str | None:
    if device.capability in BLACKWELL:
        return None
    where = sm(device.capability) if device.capability else device.type
    return f"{where} has no FP4 tensor cores"


def _same_format(problem: Problem, formats: Mapping[str, int] | tuple[str, ...]) -> str | None:
    a, b = problem.formats
    if a == b and a in formats:
        return None
    return f"it takes two operands of one format among {', '.join(formats)}, not {a} and {b}"


def _aligned(problem: Problem) -> str | None:
    bits = ELEMENT_BITS[problem.formats[0]]
    for depth in problem.depths:
        if depth * bits % (8 * _ROW_BYTES):
            return (
                f"R = {depth} makes rows of {depth * bits / 8:g} bytes, not a multiple of "
                f"{_ROW_BYTES}"
            )
    return None


def _cublas(device: Device, problem: Problem) -> str | None:
    why = _blackwell(device) or _same_format(problem, ("nvfp4", "mxfp8")) or _aligned(problem)
    if why is None and problem.columns % 16:
        why = f"N = {problem.columns} is not a multiple of 16"
    if why is None and problem.formats[0] == "mxfp8" and problem.depths[0] % 32:
        why = f"R = {problem.depths[0]} is not a multiple of 32"
    if why is None and problem.depths[0] != problem.depths[1]:
        why = f"the operands are padded differently, to R = {problem.depths}"
    return why


def shape_refusal(problem: Problem, output_bytes: int = 4) -> str | None:
    """Why `kernels.gemm` does not take a problem on any device; None if it does.

    output_bytes: size of an element of the result.
    """
    why = _same_format(problem, ELEMENT_BITS) or _aligned(problem)
    if why is None and problem.columns * output_bytes % _ROW_BYTES:
        why = f"N = {problem.columns} is not a multiple of {_ROW_BYTES // output_bytes}"
    return why


def _decode(device: Device, problem: Problem) -> str | None:
    return device.without_triton or shape_refusal(problem)


def _dot_scaled(device: Device, problem: Problem) -> str | None:
    return _blackwell(device) or _decode(device, problem)


def _never(device: Device, problem: Problem) -> str | None:
    return None


TABLE = (
    Row("blackwell", "cublas", _cublas),
    Row("blackwell", "dot_scaled", _dot_scaled),
    Row("emulated", "decode", _decode),
    Row("emulated", "torch", _never),
)
"""cublas: `torch.nn.functional.scaled_mm`. dot_scaled, decode: `kernels.gemm`. torch: BF16 values,
and `torch.mm`."""


def choose(
    device: Device,
    problem: Problem,
    measured: Mapping[str, tune.Entry] | None = None,
    backend: str | None = None,
) -> Choice:
    """The kernel for a problem.

    Args:
        measured: a tune of this card.
        backend: keep to this backend; None leaves it open.

    Raises:
        ValueError: `backend` has no kernel for the problem.
    """
    refused: list[str] = []
    allowed: list[Row] = []
    for row in TABLE:
        if backend not in (None, row.backend) or (allowed and allowed[0].backend != row.backend):
            continue
        why = row.refusal(device, problem)
        if why is None:
            allowed.append(row)
        elif not allowed:
            refused.append(f"{row.kernel}: {why}")
    if not allowed:
        raise ValueError(
            f"backend {backend!r} cannot multiply {problem} ({'; '.join(refused)}); leave the "
            "backend open, or change the shape"
        )
    return _fastest(allowed, problem, measured or {}, "; ".join(refused))


def _fastest(
    allowed: list[Row], problem: Problem, measured: Mapping[str, tune.Entry], refused: str
) -> Choice:
    entry = measured.get(str(problem))
    kernels = {row.kernel: row for row in allowed}
    if entry is not None and entry.kernel in kernels:
        row = kernels[entry.kernel]
        reason = f"fastest of its tune, {entry.microseconds:.1f} us"
        return Choice(row.backend, row.kernel, reason, entry.tiling)
    return Choice(allowed[0].backend, allowed[0].kernel, refused or "first in the table")


def describe(device: torch.device) -> Device:
    """What the table needs to know of a device."""
    if device.type != "cuda":
        return _describe_other(device.type)
    return _describe_cuda(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _describe_other(type: str) -> Device:
    return Device(type, without_triton=f"Triton's kernels need CUDA, not {type}")


@functools.cache
def _describe_cuda(index: int) -> Device:
    capability = torch.cuda.get_device_capability(index)
    why = triton_missing()
    if why is None and capability not in TRITON_TARGETS:
        why = f"Triton's kernels are not built for {sm(capability)}"
    return Device("cuda", capability, torch.cuda.get_device_name(index), why)


def triton_missing() -> str | None:
    """Why Triton cannot be used at all; None if it can."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


@functools.lru_cache(maxsize=4096)
def choose_on(device: torch.device, problem: Problem, backend: str | None = None) -> Choice:
    """`choose` for a real device, with the tune stored for its card; logged once a problem."""
    described = describe(device)
    choice = choose(described, problem, tune.load(described.name), backend)
    if device.type == "cuda":
        quantized = any(format in ELEMENT_BITS for format in problem.formats)
        unexpected = quantized and not (
            choice.backend == "blackwell" or backend or _blackwell(described)
        )
        log.log(
            logging.WARNING if unexpected else logging.INFO,
            "%s runs on %s (%s): %s",
            problem,
            choice.backend,
            choice.kernel,
            choice.reason,
        )
    return choice
