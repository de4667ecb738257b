"""`python -m kernels.tuner 8192x4096x4096 ...`: measure which GEMM kernel is fastest on this card.

Each argument is M x N x R of one GEMM: Fprop is tokens x features out x features in, Dgrad tokens x
features in x features out, Wgrad features out x features in x tokens. Every kernel of the table
that takes the shape runs with every tiling; the fastest is stored, see `kernels.tune`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from kernels import dispatch, tune
from kernels.dispatch import Device, Problem
from kernels.operand import Operand
from kernels.tune import Entry


def parse(shape: str, format: str) -> Problem:
    """A problem from "MxNxR".

    Raises:
        ValueError: not three positive integers.
    """
    parts = shape.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"a shape is MxNxR, as 8192x4096x4096, not {shape!r}")
    rows, columns, depth = map(int, parts)
    return Problem((format, format), rows, columns, (depth, depth))


def candidates(device: Device, problem: Problem, target: int) -> list[tuple[str, int]]:
    """Kernel and tiling of everything that takes the problem, within the backend that it gets."""
    from kernels.gemm import tilings

    backend = dispatch.choose(device, problem).backend
    found = []
    for row in dispatch.TABLE:
        if row.backend == backend and row.kernel != "torch" and not row.refusal(device, problem):
            ours = row.kernel != "cublas"
            count = len(tilings(target, row.kernel == "decode")) if ours else 1
            found += [(row.kernel, tiling) for tiling in range(count)]
    return found


def measure(device: Device, problem: Problem, on: torch.device) -> dict[str, Entry]:
    """The best of each kernel."""
    from kernels.target import target_of

    timed: dict[str, Entry] = {}
    a, b = (random(problem, rows, on) for rows in (problem.rows, problem.columns))
    for kernel, tiling in candidates(device, problem, target_of(on)):
        seconds = time_of(runner(kernel, tiling, a, b))
        entry = Entry(kernel, tiling, 1e6 * seconds)
        if kernel not in timed or entry.microseconds < timed[kernel].microseconds:
            timed[kernel] = entry
    return timed


def random(problem: Problem, rows: int, on: torch.device) -> Operand:
    """Random codes, and scales of 1."""
    format, depth = problem.formats[0], problem.depths[0]
    width = depth * dispatch.ELEMENT_BITS[format] // 8
    codes = torch.randint(0, 120, (rows, width), dtype=torch.uint8, device=on)
    block = 16 if format == "nvfp4" else 32
    scales = -(-rows // 128) * 128 * (-(-depth // (4 * block)) * 4)
    if format == "nvfp4":
        ones = torch.ones(scales, device=on).to(torch.float8_e4m3fn)
        return Operand(codes, ones, torch.ones((), device=on))
    ones = torch.full((scales,), 127, dtype=torch.uint8, device=on).view(torch.float8_e8m0fnu)
    return Operand(codes if format == "mxfp4" else codes.view(torch.float8_e4m3fn), ones)


def runner(kernel: str, tiling: int, a: Operand, b: Operand) -> Callable[[], object]:
    """One kernel on the operands."""
    if kernel == "cublas":
        from kernels.cublas import scaled_mm

        return lambda: scaled_mm(a, b)
    from kernels.gemm import gemm_of

    return lambda: gemm_of(a, b, dispatch.Choice("", kernel, "", tiling))


def time_of(run: Callable[[], object]) -> float:
    """Median seconds."""
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median")) / 1e3


def main() -> int:
    """Measure the shapes and store the result."""
    parser = argparse.ArgumentParser(prog="python -m kernels.tuner", description=__doc__)
    parser.add_argument("--format", choices=sorted(dispatch.ELEMENT_BITS), default="nvfp4")
    parser.add_argument("shapes", nargs="+", help="MxNxR")
    arguments = parser.parse_args()
    try:
        problems = [parse(shape, arguments.format) for shape in arguments.shapes]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        print("no CUDA device: a tune measures a card", file=sys.stderr)
        return 1
    on = torch.device("cuda", torch.cuda.current_device())
    device = dispatch.describe(on)
    chosen = {}
    for problem in problems:
        timed = measure(device, problem, on)
        if not timed:
            print(f"{problem}: plain torch alone takes it")
            continue
        chosen[str(problem)] = min(timed.values(), key=lambda entry: entry.microseconds)
        told = ", ".join(
            f"{k} {e.microseconds:.1f} us (tiling {e.tiling})" for k, e in timed.items()
        )
        print(f"{problem}: {told}")
    print(f"stored in {tune.save(device.name, chosen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
