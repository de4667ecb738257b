"""The checks of the burn-in, in the order of its page.

Each takes the device and returns what to print. Those on bytes and sums also run in Triton's
interpreter, on CPU tensors: the tests do so.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels import dispatch, tuner
from kernels.burnin import curve, judge
from kernels.burnin.verdicts import Check, CheckError, NotCheckedError
from quant import apply_recipe, named_recipe
from quant.backend import backend
from quant.copies import quantize_rowcol, quantize_weight
from quant.formats import MXFP4, MXFP8, NVFP4, NVFP4_2D, Format
from quant.gemm import KERNELS as GEMM_KERNELS
from quant.gemm import gemm
from quant.quantize import QuantizedTensor, amax_and_nonfinite, dequantize, quantize
from quant.rounding import Copy, Role, RoundingKey, random_bytes

ROW_KEY = RoundingKey(2**63 + 5, 2, 7, 11, Role.GRADIENT, Copy.ROW)
COLUMN_KEY = RoundingKey(2**63 + 5, 2, 7, 11, Role.GRADIENT, Copy.COLUMN)
SR_BOTH = {
    "row_rounding": "stochastic",
    "row_key": ROW_KEY,
    "column_rounding": "stochastic",
    "column_key": COLUMN_KEY,
    "column_guard": True,
}
SHAPE = (1040, 2176)
"""Rows and columns of the matrices: whole and partial tiles both ways."""


def checks() -> list[tuple[str, Check]]:
    """All checks by name."""
    return [
        ("the card", card),
        ("amax, non-finite count", statistics),
        ("row and column, nearest", partial(copies, options={"column_rht": True})),
        ("row and column, stochastic", partial(copies, options={"column_rht": True, **SR_BOTH})),
        ("weight 16x16, transpose", weights),
        ("MXFP4, MXFP8", mx),
        ("dequantize", values),
        ("byte order of cvt.rs", cvt_rs),
        *((f"GEMM {name}", partial(products, kernel=name)) for name in KERNELS),
        ("GEMM twice, the same bits", same_gemm),
        ("step oracle, one linear", oracle),
        ("step oracle, two steps", oracle_steps),
        ("a step twice, the same bits", same_step),
        ("collectives", collectives),
        ("bandwidth and BF16 peak", peaks),
        ("FP4 GEMM speed", fp4_speed),
        ("200 steps beside the CPU's", training),
    ]


def card(device: torch.device) -> str:
    """What it is, and what the table would run on it."""
    import triton

    described = dispatch.describe(device)
    if described.without_triton is not None:
        raise CheckError(described.without_triton)
    choice = dispatch.choose(
        described, dispatch.Problem(("nvfp4", "nvfp4"), 4096, 4096, (4096, 4096))
    )
    assert described.capability is not None
    return (
        f"{described.name}, {dispatch.sm(described.capability)}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, Triton {triton.__version__}; NVFP4 runs on {choice.backend} "
        f"({choice.kernel})"
    )


def matrices(shape: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """Gaussian, wide and with zeros and non-finite elements, in both types; on the CPU."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(shape, generator=generator)
        yield f"Gaussian {dtype}", x.to(dtype)
        wide = x * torch.exp2(torch.randint(-60, 60, shape, generator=generator).float())
        wide[::3, ::5] = 0
        yield f"wide {dtype}", wide.to(dtype)
    x[1, 3], x[-1, -1] = float("nan"), float("-inf")
    yield "non-finite", x


def statistics(device: torch.device, shape: tuple[int, int] = SHAPE) -> str:
    """Amax and number of non-finite elements."""
    compared = 0
    for name, x in matrices(shape):
        with backend("reference"):
            wanted = amax_and_nonfinite(x)
        with backend("triton"):
            made = amax_and_nonfinite(x.to(device))
        for a, b in zip(made, wanted, strict=True):
            compared += judge.same_bytes(name, a.reshape(1), b.reshape(1))
    return f"{compared} bytes equal"


def copies(
    device: torch.device, options: dict, shape: tuple[int, int] = SHAPE, format: Format = NVFP4
) -> str:
    """Row and column copies."""
    compared = 0
    for name, x in matrices(shape):
        with backend("reference"):
            wanted = quantize_rowcol(x, format, format, swizzled=True, **options)
        with backend("triton"):
            made = quantize_rowcol(x.to(device), format, format, swizzled=True, **options)
        compared += same_copy(f"{name}, row", made.row, wanted.row)
        compared += same_copy(f"{name}, column", made.column, wanted.column)
    return f"{compared:,} bytes equal"


def same_copy(name: str, made: QuantizedTensor | None, wanted: QuantizedTensor | None) -> int:
    """Number of bytes compared: codes, scales and S_dec."""
    assert made is not None
    assert wanted is not None
    compared = judge.same_bytes(f"{name}: codes", made.codes, wanted.codes)
    compared += judge.same_bytes(f"{name}: scales", made.scales, wanted.scales)
    if wanted.global_scale is not None:
        assert made.global_scale is not None
        one, other = made.global_scale.reshape(1), wanted.global_scale.reshape(1)
        compared += judge.same_bytes(f"{name}: S_dec", one, other)
    return compared


def weights(device: torch.device, shape: tuple[int, int] = SHAPE) -> str:
    """Both copies of a weight, and the transpose from codes alone."""
    compared = 0
    for name, w in matrices(shape):
        with backend("reference"):
            wanted = quantize_weight(w, NVFP4_2D, swizzled=True)
        with backend("triton"):
            made = quantize_weight(w.to(device), NVFP4_2D, swizzled=True)
            turned = made[0].transpose()
        for copy, a, b in zip(("W", "W^T"), made, wanted, strict=True):
            compared += same_copy(f"{name}, {copy}", a, b)
        compared += same_copy(f"{name}, transposed", turned, wanted[1])
    return f"{compared:,} bytes equal"


def mx(device: torch.device, shape: tuple[int, int] = SHAPE) -> str:
    """Row and column copies in MXFP4, with and without a transform and random bits, and MXFP8."""
    stochastic = {key: value for key, value in SR_BOTH.items() if "guard" not in key}
    for options in ({}, {"column_rht": 32}, stochastic):
        text = copies(device, options, shape, MXFP4)
    copies(device, {}, shape, MXFP8)
    return f"{text}, four times"


def values(device: torch.device, shape: tuple[int, int] = SHAPE) -> str:
    """Values of every format, from either layout of the scales."""
    compared = 0
    x = next(iter(matrices(shape)))[1]
    for format in (NVFP4, MXFP4, MXFP8):
        with backend("reference"):
            q = quantize(x, format)
            wanted = dequantize(q, torch.bfloat16)
        for made in (q, q.swizzle()):
            with backend("triton"):
                found = dequantize(made.to(device), torch.bfloat16)
            compared += judge.same_bytes(format.name, found, wanted)
    return f"{compared:,} bytes equal"


def cvt_rs(device: torch.device, size: int = 1 << 20) -> str:
    """Which random byte meets which element, found from codes alone."""
    from kernels.e2m1 import rs_byte_order

    if dispatch.describe(device).capability not in ((10, 0), (10, 3)):
        raise NotCheckedError("cvt.rs exists on sm_100 and sm_103 only")
    y = torch.rand(size, generator=torch.Generator().manual_seed(1)) * 12 - 6
    y[::16] = 6.0  # with an amax of 2688 every scale is 1
    with backend("triton"):
        q = quantize(
            y.view(-1, 1024).to(device),
            NVFP4,
            amax=torch.tensor(2688.0),
            rounding="stochastic",
            key=ROW_KEY,
        )
    codes = torch.stack((q.codes & 15, q.codes >> 4), -1).cpu().view(-1, 4)
    orders = judge.byte_orders(codes, y.view(-1, 4), random_bytes(ROW_KEY, 0, size).view(-1, 4))
    if orders == [(0, 1, 2, 3)]:
        return f"each element takes its own byte; rs_byte_order() = {rs_byte_order():#06x} stands"
    if len(orders) == 1:
        selector = judge.mended_selector(rs_byte_order(), orders[0])
        raise CheckError(
            f"elements take bytes {orders[0]}: kernels.e2m1.rs_byte_order must be {selector:#06x}"
        )
    raise CheckError(f"no order of four bytes explains the codes ({len(orders)} do)")


KERNELS = ("cublas", "dot_scaled", "decode")
PRODUCTS = ((17, 144, 96), (1040, 2176, 1056), (256, 512, 4096))


def products(
    device: torch.device, kernel: str, shapes: tuple[tuple[int, int, int], ...] = PRODUCTS
) -> str:
    """Exact where values are integers; within the bound of summation elsewhere. Every tiling."""
    from kernels.gemm import tilings
    from kernels.target import target_of

    described = dispatch.describe(device)
    row = next(row for row in dispatch.TABLE if row.kernel == kernel)
    tried = len(tilings(target_of(device), kernel == "decode")) if kernel != "cublas" else 1
    worst, count = 0.0, 0
    for format in (NVFP4, MXFP4, MXFP8):
        for rows, columns, depth in shapes:
            problem = dispatch.Problem((format.name,) * 2, rows, columns, (depth, depth))
            why = row.refusal(described, problem)
            if why is not None:
                continue
            for a, b, bound in (
                integers(format, rows, columns, depth),
                drawn(format, rows, columns, depth),
            ):
                wanted = gemm(a, b, "emulated")
                for tiling in range(tried):
                    made = product(a.to(device), b.to(device), kernel, tiling)
                    share = judge.judge_sums(f"{problem}, tiling {tiling}", made, wanted, bound)
                    worst, count = max(worst, share), count + 1
    if not count:
        raise NotCheckedError(why or "no shape")
    return f"{count} products; at most {worst:.2g} of the bound of summation"


def product(a: QuantizedTensor, b: QuantizedTensor, kernel: str, tiling: int) -> Tensor:
    """By one kernel."""
    return GEMM_KERNELS[kernel](a.swizzle(), b.swizzle(), dispatch.Choice("", kernel, "", tiling))


def integers(
    format: Format, rows: int, columns: int, depth: int
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
    """Operands whose products sum to integers below 2^24, and a bound of nothing."""
    generator = torch.Generator().manual_seed(depth)
    made = []
    for size in (rows, columns):
        x = torch.randint(-1, 2, (size, depth), generator=generator).float()
        x[:, :: format.block[1]] = format.element_max
        made.append(
            quantize(x, format, amax=torch.tensor(2688.0) if format.has_global_scale else None)
        )
    return made[0], made[1], torch.zeros(rows, columns)


def drawn(
    format: Format, rows: int, columns: int, depth: int
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
    """Operands whose sums depend on order, and how far two orders may lie apart.

    Twice what rounding to nearest allows: tensor cores may cut bits off instead.
    """
    generator = torch.Generator().manual_seed(depth)
    a, b = (quantize(torch.randn(s, depth, generator=generator), format) for s in (rows, columns))
    sizes = dequantize(a).double().abs() @ dequantize(b).double().abs().t()
    return a, b, 4 * (depth + 1) * 2.0**-24 * sizes


def same_gemm(device: torch.device) -> str:
    """Two runs of every kernel that the card has."""
    described, ran = dispatch.describe(device), []
    problem = dispatch.Problem(("nvfp4", "nvfp4"), 1040, 2176, (1056, 1056))
    a, b, _ = drawn(NVFP4, problem.rows, problem.columns, problem.depths[0])
    for row in dispatch.TABLE:
        if row.refusal(described, problem) is None:
            first, second = (product(a.to(device), b.to(device), row.kernel, 0) for _ in range(2))
            judge.same_bytes(row.kernel, first, second)
            ran.append(row.kernel)
    return ", ".join(ran)


def _needs_the_oracle() -> None:
    if (
        importlib.util.find_spec("tests") is None
        or importlib.util.find_spec("tests.oracle") is None
    ):
        raise NotCheckedError("tests/oracle is not here: run from a checkout of the repository")


def oracle(device: torch.device, shape: tuple[int, int, int] = (48, 64, 96)) -> str:
    """Forward and backward of one linear, by the NumPy oracle that knows nothing of `quant`."""
    _needs_the_oracle()
    from kernels.burnin.oracle import compare_linear

    return compare_linear(device, shape)


def oracle_steps(device: torch.device) -> str:
    """Two whole steps of a hybrid, by the same oracle."""
    _needs_the_oracle()
    from kernels.burnin.oracle import SLACK, compare_steps

    return compare_steps(device, SLACK)


def same_step(device: torch.device, tokens: int = 512) -> str:
    """Gradients of a small hybrid, twice: its scan, its attention and its linears."""
    first, second = (gradients(device, tokens) for _ in range(2))
    different = [name for name, g in first.items() if not torch.equal(g, second[name])]
    if different:
        raise CheckError(
            f"{len(different)} of {len(first)} gradients differ between two equal steps, first of "
            f"{different[0]}: set torch.use_deterministic_algorithms, and see docs/training.md"
        )
    flushed = [name for name, g in first.items() if not g.any()]
    if flushed:
        raise CheckError(f"the gradient of {flushed[0]} is all zero")
    return f"{len(first)} gradients, none all zero"


def gradients(device: torch.device, tokens: int) -> dict[str, Tensor]:
    """One forward and backward pass of a hybrid of all three kinds of blocks."""
    from model import HybridModel, ModelConfig

    config = ModelConfig("M-*-M", 256, 128, 256, 4, 2, 32, 8, 32, 32, 2, mamba_chunk_size=64)
    model = HybridModel(config, seed=1).to(device)
    recipe = named_recipe("nvfp4_paper").with_blocks(0, 0)
    precision = apply_recipe(model, recipe, num_blocks=5, seed=2)
    precision.begin(1, 0)
    drawn_BT = torch.randint(1, 256, (2, tokens), generator=torch.Generator().manual_seed(3))
    tokens_BT = drawn_BT.to(device)
    documents_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)
    loss, count = model(tokens_BT, tokens_BT.roll(-1, 1), documents_BT)
    (loss / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def collectives(device: torch.device) -> str:
    """An all-reduce of one tensor, twice."""
    if torch.cuda.device_count() < 2:
        raise NotCheckedError("one card: nothing to reduce over")
    from kernels.burnin.collectives import reduce_twice

    return reduce_twice()


def peaks(device: torch.device) -> str:
    """Copy bandwidth, and a large BF16 GEMM."""
    copy, bf16 = curve.measure_peaks(device)
    return judge.judge_peaks(dispatch.describe(device).name, copy, bf16)


def fp4_speed(device: torch.device, size: int = 8192) -> str:
    """Every kernel of the table on one large GEMM, with its best tiling."""
    described, told = dispatch.describe(device), []
    problem = dispatch.Problem(("nvfp4", "nvfp4"), size, size, (size, size))
    for kernel, entry in tuner.measure(described, problem, device).items():
        told.append(f"{kernel} {2 * size**3 / entry.microseconds / 1e6:.0f} TFLOP/s")
    return f"{size}^3: {', '.join(told)}"


def training(device: torch.device) -> str:
    """Both runs start from one corpus, and go on at the same time."""
    if importlib.util.find_spec("pipeline") is None:
        raise NotCheckedError("the pipeline is not installed")
    with tempfile.TemporaryDirectory(prefix="burnin-") as root:
        card, cpu = curve.two_runs(Path(root))
    return judge.judge_curves(card, cpu)
