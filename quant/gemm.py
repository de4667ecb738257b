"""The GEMM of quantized operands, by backend.

Every GEMM here is `a_MR @ b_NR.T`: both operands lie along R, the dimension that is reduced, which
is the only form FP4 tensor cores have.

`emulated` is exact up to the order of addition. An element times its block scale has at most 6
significant bits and so is a BF16 value; products of two BF16 values are exact in FP32; the tensor
scales come after the sum. A CUDA device multiplies BF16 tensors with FP32 output. A CPU multiplies
FP32 tensors that hold the same values, since its BF16 product would be rounded to BF16 before the
tensor scales; where it has AMX, oneDNN is allowed to use it.

`blackwell` multiplies codes and scales on FP4 tensor cores. Which kernel runs either backend is the
choice of a table (`kernels.dispatch`) that `choose_backend` asks.

`reference` is the definition, block by block. It is slow and serves the tests.

Legend: M, N rows of the operands, R the reduced dimension.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch
from kernels.dispatch import Choice, Problem
from kernels.operand import Operand
from quant.formats import Format
from quant.layout import unpack_nibbles
from quant.quantize import QuantizedTensor, dequantize
from quant.rounding import e2m1_values


@dataclass(frozen=True)
class Decoded:
    """An operand ready to multiply: BF16 values without the tensor scale, and the tensor scale.

    The values are a BF16 tensor, or an FP32 tensor that holds BF16 values. A BF16 operand is one
    whose scale is None.
    """

    values: Tensor
    scale: Tensor | None = None

    def transpose(self) -> Decoded:
        """The same operand the other way round: a view."""
        return Decoded(self.values.t(), self.scale)


Factor = QuantizedTensor | Decoded
Gemm = Callable[..., Tensor]  # (a, b, choice, total=None)

BACKENDS = (*dispatch.BACKENDS, "reference")


def bf16_operand(x: Tensor) -> Decoded:
    """`x` rounded to BF16, as an operand."""
    return Decoded(x.to(torch.bfloat16))


def transpose(q: QuantizedTensor, backend: str) -> Factor:
    """A weight of square blocks, transposed: as codes where the backend multiplies codes."""
    if backend != "emulated":
        return q.transpose()
    values = dequantize(q, _operand_dtype(q.codes.device), global_scale=False)
    return Decoded(values.t(), q.global_scale)


def choose_backend(device: torch.device, problem: Problem, backend: str | None = None) -> Choice:
    """The backend and the kernel that run a GEMM on `device`: the one place that decides.

    Args:
        backend: one of `BACKENDS` to keep to; None leaves it open.

    Raises:
        ValueError: `backend` cannot run it.
    """
    assert device.type in ("cpu", "cuda", "meta"), device
    if backend == "reference":
        return Choice("reference", "reference")
    return dispatch.choose_on(device, problem, backend)


def multiplies_codes(device: torch.device, backend: str | None = None) -> bool:
    """Whether kernels there multiply codes: then operands keep their scales as these read them."""
    if backend == "reference":
        return False
    described = dispatch.describe(device)
    return described.without_triton is None or described.capability in dispatch.BLACKWELL


def format_name(format: Format | None) -> str:
    """What the table calls a format: one name for all that kernels read alike."""
    if format is None:
        return "bf16"
    if format.scale == "fp32":  # powers of two are MXFP8's, of longer blocks
        return "mxfp8" if exact_in_bf16(format) else format.name
    return {"e4m3": "nvfp4"}.get(format.scale, "mxfp4" if format.element == "e2m1" else "mxfp8")


def problem_of(a_MR: Factor, b_NR: Factor) -> Problem:
    """What the table is asked about `a @ b.T`."""
    (format_a, (rows, depth_a)), (format_b, (columns, depth_b)) = map(_described, (a_MR, b_NR))
    return Problem((format_a, format_b), rows, columns, (depth_a, depth_b))


def _described(factor: Factor) -> tuple[str, torch.Size]:
    if isinstance(factor, Decoded):
        return format_name(None), factor.values.shape
    return format_name(factor.format), factor.shape


def exact_in_bf16(format: Format) -> bool:
    """Whether an element times its block scale is always a BF16 value; free FP32 scales are not."""
    return format.scale != "fp32" or format.scale_rounding != "nearest"


def gemm(
    a_MR: Factor, b_NR: Factor, backend: str | None = None, total: Tensor | None = None
) -> Tensor:
    """`a @ b.T` in FP32, tensor scales applied, by `backend` or what suits device and shape.

    With `total` (FP32 [M, N], contiguous) the product is added to it, in place: by the kernel
    itself where it is ours, after it elsewhere. The bits are the same.

    Operands over tokens may be padded with zeros to different multiples; the excess of the longer
    adds nothing.

    `torch.autocast` has no part in it: it would round the products to BF16 before the tensor
    scales, and with them every weight gradient. The recipe alone says what is rounded.
    """
    device = _device(a_MR)
    choice = choose_backend(device, problem_of(a_MR, b_NR), backend)
    with _without_autocast(device.type):
        return KERNELS[choice.kernel](a_MR, b_NR, choice, total)


def _added(y_MN: Tensor, total: Tensor | None) -> Tensor:
    return y_MN if total is None else total.add_(y_MN)


def _scaled(y_MN: Tensor, a: Factor, b: Factor) -> Tensor:
    scale = _product(a, b)
    return y_MN if scale is None else y_MN.mul_(scale)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _device(factor: Factor) -> torch.device:
    return factor.values.device if isinstance(factor, Decoded) else factor.codes.device


def _product(a: Factor, b: Factor) -> Tensor | None:
    scales = [s for s in (_tensor_scale(a), _tensor_scale(b)) if s is not None]
    return functools.reduce(torch.mul, scales) if scales else None


def _tensor_scale(factor: Factor) -> Tensor | None:
    return factor.scale if isinstance(factor, Decoded) else factor.global_scale


def _operand_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _torch(a_MR: Factor, b_NR: Factor, choice: Choice, total: Tensor | None = None) -> Tensor:
    a, b = _values(a_MR), _values(b_NR)
    length = min(a.shape[1], b.shape[1])
    a, b_RN = a[:, :length], b[:, :length].t()
    if a.device.type != "cpu":
        y_MN = torch.mm(a, b_RN, out_dtype=torch.float32)
        return _added(_scaled(y_MN, a_MR, b_NR), total)
    with bf16_matmul(cpu_multiplies_bf16_faster()):
        y_MN = torch.mm(a, b_RN)
    return _added(_scaled(y_MN, a_MR, b_NR), total)


def _values(factor: Factor) -> Tensor:
    if isinstance(factor, Decoded):
        return factor.values.to(_operand_dtype(factor.values.device))
    return dequantize(factor, _operand_dtype(factor.codes.device), global_scale=False)


@contextmanager
def bf16_matmul(enabled: bool) -> Iterator[None]:
    """Let oneDNN take the BF16 path for FP32 tensors, and restore the setting after.

    Exact for our operands: they hold BF16 values, and it accumulates in FP32.
    """
    if not enabled:
        yield
        return
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@functools.cache
def cpu_multiplies_bf16_faster() -> bool:
    """Measured once per process, and only where the CPU has AMX or AVX512-BF16.

    A clear gain is asked for, so that the answer, and with it the order of the sums, does not
    change from one process to the next on the same machine.
    """
    if not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return False
    a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)

    def fastest(enabled: bool) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            with bf16_matmul(enabled):
                torch.mm(a, b)
            times.append(time.perf_counter() - start)
        return min(times)

    return fastest(True) * 1.5 < fastest(False)


_STEP = 16  # divides every block length


def _cublas(a_MR: Factor, b_NR: Factor, choice: Choice, total: Tensor | None = None) -> Tensor:
    from kernels.cublas import scaled_mm

    return _added(scaled_mm(_operand(a_MR), _operand(b_NR)), total)


def _triton(a_MR: Factor, b_NR: Factor, choice: Choice, total: Tensor | None = None) -> Tensor:
    from kernels.gemm import gemm_of

    return gemm_of(_operand(a_MR), _operand(b_NR), choice, total)


def _operand(factor: Factor) -> Operand:
    assert isinstance(factor, QuantizedTensor)
    q = factor.swizzle()
    codes = q.codes if q.format.element_bits == 4 else q.codes.view(torch.float8_e4m3fn)
    return Operand(codes, q.scales, q.global_scale)


def _reference(a_MR: Factor, b_NR: Factor, choice: Choice, total: Tensor | None = None) -> Tensor:
    """Sum over blocks of (sum of element products) * scale of a * scale of b, all FP32."""
    a, a_scales = _elements(a_MR)
    b, b_scales = _elements(b_NR)
    y_MN = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for start in range(0, min(a.shape[1], b.shape[1]), _STEP):
        block = slice(start, min(start + _STEP, a.shape[1], b.shape[1]))
        products = (a[:, None, block] * b[None, :, block]).sum(-1)
        y_MN += products * a_scales[:, None, start] * b_scales[None, :, start]
    return _added(_scaled(y_MN, a_MR, b_NR), total)


def _elements(factor: Factor) -> tuple[Tensor, Tensor]:
    """FP32 element values [M, R], and the block scale of each."""
    if isinstance(factor, Decoded):
        values = factor.values.float()
        return values, torch.ones_like(values)
    four_bits = factor.format.element_bits == 4
    codes = factor.codes
    values = e2m1_values(unpack_nibbles(codes)) if four_bits else codes.view(torch.float8_e4m3fn)
    scales = factor.plain().scales.float().repeat_interleave(factor.format.block[1], dim=1)
    return values.float(), scales


KERNELS: dict[str, Gemm] = {
    "cublas": _cublas,
    "dot_scaled": _triton,
    "decode": _triton,
    "torch": _torch,
    "reference": _reference,
}
