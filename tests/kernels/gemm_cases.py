"""What the GEMM's tests run in the process in which Triton interprets."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from kernels.dispatch import Choice
from kernels.gemm import Tiling, gemm
from kernels.operand import Operand
from quant.formats import NVFP4
from quant.gemm import KERNELS, Factor
from quant.layout import swizzle_scales
from quant.quantize import QuantizedTensor
from tests.kernels import interpreted_dot

interpreted_dot.mend()


def operand(q: QuantizedTensor) -> Operand:
    """`q` as the kernel takes it, at the start of memory that holds no zeros after it."""
    codes = in_noise(q.codes)
    if q.format.element == "e4m3":
        codes = codes.view(torch.float8_e4m3fn)
    scales = q.scales if q.swizzled else swizzle_scales(q.scales)
    return Operand(codes, in_noise(scales.view(torch.uint8)).view(scales.dtype), q.global_scale)


def in_noise(t: Tensor) -> Tensor:
    """The same bytes, with others behind them that a kernel must not read."""
    memory = torch.full((t.numel() + 8192,), 0x7E, dtype=torch.uint8)
    memory[: t.numel()] = t.flatten()
    return memory[: t.numel()].view(t.shape)


def product(
    a: QuantizedTensor,
    b: QuantizedTensor,
    decode: bool,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """The kernel's result; added to `out` if that is given."""
    arguments = {"decode": decode, "dtype": dtype, "tiling": tiling}
    return gemm(operand(a), operand(b), out=out, accumulate=out is not None, **arguments)


def by_kernel(a: Factor, b: Factor, kernel: str) -> Tensor:
    """The kernel as `quant.gemm` calls it."""
    return KERNELS[kernel](a, b, Choice("blackwell", kernel))


def needs_mending() -> tuple[bool, bool]:
    """Whether the interpreter's own `dot` and `dot_scaled` are still wrong."""
    interpreted_dot.restore()
    try:
        return _wrong(decode=True), _wrong(decode=False)
    finally:
        interpreted_dot.mend()


def _wrong(decode: bool) -> bool:
    codes = torch.full((16, 16), 0x22, dtype=torch.uint8)  # ones
    q = QuantizedTensor(
        codes,
        torch.full((16, 2), 2.0).to(torch.float8_e4m3fn),
        torch.tensor(1.0),
        NVFP4,
        torch.Size((16, 32)),
    )
    try:
        return not torch.equal(product(q, q, decode), torch.full((16, 16), 128.0))
    except (InterpreterError, AttributeError):
        return True
