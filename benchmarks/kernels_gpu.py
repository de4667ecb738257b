"""Speed of the quantizers and the GEMM on this GPU, beside torch.compile's and torchao's.

Method: correctness first. The checks of `kernels.burnin` on bytes and sums run; if one fails,
nothing is timed and the exit code is 1. Then medians of Triton's `do_bench` (warm, the L2 cache
cleared before each run), in one process.

Quantizers: an 8192 x 8192 BF16 Gaussian matrix. `share` is the bytes that must move (x read once,
codes and scales written) over the time, over the bandwidth of a copy of 1 GiB measured in the same
process. Row and column copies need the amax first; it is timed apart, and together with them
("whole"). The peers are the plain torch reference under torch.compile, and torchao's quantizers
where it is installed.

GEMM: M x N x R as named, every kernel of the table that takes the format, with its best tiling.
`share` is operations a second over those of a BF16 GEMM of 8192^3 measured in the same process: 2
or more is what FP4 is for.

    python benchmarks/kernels_gpu.py [--json] [--size 8192] [--seconds 420]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import show
from kernels import dispatch, tuner
from kernels.burnin import checks, curve
from kernels.burnin import verdicts as page
from kernels.burnin.verdicts import Verdict, run
from quant import gpu
from quant.backend import backend
from quant.formats import MXFP4, MXFP8, NVFP4, NVFP4_2D
from quant.hadamard import resolve_signs
from quant.quantize import dequantize, quantize

BYTE_CHECKS = ("amax", "row and column", "weight", "MXFP4", "dequantize", "cvt.rs", "GEMM")
GEMM_SHAPES = ((8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 14336, 8192))
ELEMENT = {"nvfp4": 4.5 / 8, "mxfp4": 4.25 / 8, "mxfp8": 8.25 / 8}
"""Bytes of an element, its share of the block scale included."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        share: of the measured copy bandwidth, or of the measured BF16 operations a second.
        rate: TB/s or TFLOP/s.
    """

    name: str
    microseconds: float
    rate: float
    unit: str
    share: float


def memory_row(name: str, seconds: float, moved: float, copy: float) -> Row:
    """A kernel that moves bytes, against a copy's bytes a second."""
    return Row(name, seconds * 1e6, moved / seconds / 1e12, "TB/s", moved / seconds / copy)


def gemm_row(name: str, seconds: float, shape: Sequence[int], bf16: float) -> Row:
    """A GEMM [M, N, R], against BF16 operations a second."""
    operations = 2.0 * shape[0] * shape[1] * shape[2]
    rate = operations / seconds
    return Row(name, seconds * 1e6, rate / 1e12, "TFLOP/s", rate / bf16)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """What is quoted: shares of the main kernels, and how much faster than peers they are."""
    by_name = {row.name: row for row in rows}
    quoted = {
        f"{name}_share": round(by_name[name].share, 3)
        for name in ("row_and_rht_column", "row_and_rht_column_sr", "weight_16x16", "amax_rht")
        if name in by_name
    }
    for ours, peers in (
        ("row_nearest", ("row_nearest_torch_compile", "torchao_row")),
        ("whole_row_and_rht_column", ("whole_torch_compile",)),
    ):
        for peer in peers:
            if ours in by_name and peer in by_name:
                ratio = by_name[peer].microseconds / by_name[ours].microseconds
                quoted[f"{ours}_vs_{peer}"] = round(ratio, 2)
    shares = [row.share for row in rows if row.unit == "TFLOP/s"]
    if shares:
        quoted["best_gemm_vs_bf16"] = round(max(shares), 2)
    return quoted


Candidate = tuple[str, float, Callable[[], object]]


def quantizers(x: Tensor) -> list[Candidate]:
    """Name, bytes that must move, and what is timed."""
    n, read = x.numel(), 2.0 * x.numel()
    one, two = read + n * ELEMENT["nvfp4"], read + 2 * n * ELEMENT["nvfp4"]
    signs = resolve_signs(None, 16)
    amax, amax_y, _ = gpu.amax_and_nonfinite(x, signs)
    row, column = gpu.Wanted(NVFP4, amax), gpu.Wanted(NVFP4, amax_y, signs=signs)
    keyed = [w._replace(key=k) for w, k in ((row, checks.ROW_KEY), (column, checks.COLUMN_KEY))]
    q, q8 = quantize(x, NVFP4, swizzled=True), quantize(x, MXFP8, swizzled=True)
    return [
        ("amax_rht", read, lambda: gpu.amax_and_nonfinite(x, signs)),
        ("row_nearest", one, lambda: gpu.nvfp4(x, row, None, True)),
        ("row_and_rht_column", two, lambda: gpu.nvfp4(x, row, column, True)),
        ("row_and_rht_column_sr", two, lambda: gpu.nvfp4(x, keyed[0], keyed[1], True)),
        (
            "whole_row_and_rht_column",
            read + two,
            lambda: gpu.rowcol(x, row._replace(amax=None), column._replace(amax=None), True),
        ),
        ("weight_16x16", two, lambda: gpu.quantize_weight(x, amax, True)),
        ("mxfp4", read + n * ELEMENT["mxfp4"], lambda: quantize(x, MXFP4, swizzled=True)),
        ("mxfp8", read + n * ELEMENT["mxfp8"], lambda: quantize(x, MXFP8, swizzled=True)),
        ("dequantize_nvfp4", one, lambda: dequantize(q, torch.bfloat16)),
        ("dequantize_mxfp8", read + n * ELEMENT["mxfp8"], lambda: dequantize(q8, torch.bfloat16)),
    ]


def peers(x: Tensor) -> list[Candidate]:
    """The reference under torch.compile, and torchao."""
    from quant.copies import quantize_rowcol

    n, read = x.numel(), 2.0 * x.numel()
    one, two = read + n * ELEMENT["nvfp4"], read + 2 * n * ELEMENT["nvfp4"]
    amax = x.abs().amax().float()

    def in_plain_torch(function: Callable[..., object]) -> Callable[[], object]:
        compiled = torch.compile(function)

        def call() -> object:
            with backend("reference"):
                return compiled(x)

        return call

    found: list[Candidate] = [
        (
            "row_nearest_torch_compile",
            one,
            in_plain_torch(lambda t: quantize(t, NVFP4, amax=amax).codes),
        ),
        (
            "whole_torch_compile",
            read + two,
            in_plain_torch(lambda t: quantize_rowcol(t, NVFP4, NVFP4, column_rht=True)[1].codes),
        ),
        (
            "weight_16x16_torch_compile",
            two,
            in_plain_torch(lambda t: quantize(t, NVFP4_2D, amax=amax).codes),
        ),
    ]
    if importlib.util.find_spec("torchao") is not None:
        from torchao.prototype.mx_formats.nvfp4_tensor import (
            nvfp4_quantize,
            per_tensor_amax_to_scale,
        )

        pack = torch.compile(lambda t: nvfp4_quantize(t, 16, per_tensor_amax_to_scale(amax)))
        found.append(("torchao_row", one, lambda: pack(x)))
    return found


def timed(
    candidates: Sequence[Candidate],
    copy: float,
    end: float,
    time_of: Callable[[Callable[[], object]], float] = tuner.time_of,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Row], list[str]]:
    """Rows, and what was left out and why."""
    rows, left_out = [], []
    for name, moved, call in candidates:
        if clock() > end:
            left_out.append(f"{name}: the time was over")
            continue
        try:
            rows.append(memory_row(name, time_of(call), moved, copy))
        except Exception as error:  # a peer that does not compile must not cost our own figures
            left_out.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    return rows, left_out


def gemms(
    device: torch.device, bf16: float, end: float, shapes: Sequence[tuple[int, int, int]]
) -> tuple[list[Row], list[str]]:
    """Every kernel that takes NVFP4 or MXFP8 here."""
    described = dispatch.describe(device)
    rows, left_out = [], []
    for format in ("nvfp4", "mxfp8"):
        for shape in shapes if format == "nvfp4" else shapes[:1]:
            name = f"{format} {'x'.join(map(str, shape))}"
            if time.monotonic() > end:
                left_out.append(f"{name}: the time was over")
                continue
            problem = dispatch.Problem((format, format), shape[0], shape[1], (shape[2], shape[2]))
            for kernel, entry in tuner.measure(described, problem, device).items():
                title = f"{name} {kernel}/{entry.tiling}"
                rows.append(gemm_row(title, entry.microseconds / 1e6, shape, bf16))
    return rows, left_out


def proven(device: torch.device) -> list[Verdict]:
    """Verdicts of the checks on bytes and sums."""
    chosen = [(n, c) for n, c in checks.checks() if n.startswith(BYTE_CHECKS) and "speed" not in n]
    return run(chosen, device, report=lambda v: print(page.line(v), file=sys.stderr, flush=True))


def report(result: dict, *, as_json: bool) -> None:
    """Print one JSON object, or the method and a table."""

    def line(row: dict) -> str:
        rate = f"{row['rate']:.2f} {row['unit']}"
        return f"{row['name']:40}{row['microseconds']:>10.1f}{rate:>18}{row['share']:>8.2f}"

    header = f"{'':40}{'us':>10}{'rate':>18}{'share':>8}"
    left_out = [f"left out: {reason}" for reason in result["left_out"]]
    show(__doc__, result, header, line, left_out, as_json=as_json)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=420.0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this measures one", file=sys.stderr)
        return 1
    end = time.monotonic() + arguments.seconds
    device = torch.device("cuda", torch.cuda.current_device())
    verdicts = proven(device)
    if any(verdict.status == "FAILED" for verdict in verdicts):
        print("a kernel is wrong, so none is timed", file=sys.stderr)
        return 1
    copy, bf16 = curve.measure_peaks(device)
    x = torch.randn(arguments.size, arguments.size, device=device).bfloat16()
    rows, left_out = timed(quantizers(x), copy, end)
    for more, missing in (gemms(device, bf16, end, GEMM_SHAPES), timed(peers(x), copy, end)):
        rows += more
        left_out += missing
    if importlib.util.find_spec("torchao") is None:
        left_out.append("torchao_row: torchao is not installed")
    card = dispatch.describe(device).name
    machine = (
        f"{card}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, "
        f"copy {copy / 1e12:.2f} TB/s, BF16 GEMM {bf16 / 1e12:.0f} TFLOP/s"
    )
    result = {
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "ratios": ratios(rows),
        "left_out": left_out,
        "checks": [asdict(verdict) for verdict in verdicts],
    }
    report(result, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
