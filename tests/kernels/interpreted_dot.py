"""`tl.dot_scaled` and `tl.dot` for Triton's interpreter, which lacks or misreads them.

Triton 3.8 reads every block scale as E8M0, the lowest as 0, and 3.7 has no `dot_scaled`. Both
multiply the bits of BF16 numbers as integers. `test_gemm.py` tells when a release mends this.
"""

from __future__ import annotations

from typing import Any

_PATCHED = ("create_dot", "create_dot_scaled")
_originals: dict[str, Any] = {}


def mend() -> None:
    """Patch the interpreter of this process."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    if _originals:
        return
    _originals.update({name: getattr(Builder, name, None) for name in _PATCHED})
    if _originals["create_dot_scaled"] is None:
        _take_plain_strings()
    Builder.create_dot, Builder.create_dot_scaled = dot, dot_scaled


def restore() -> None:
    """Undo `mend`."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    for name, original in _originals.items():
        setattr(Builder, name, original)
    _originals.clear()


def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    """Of BF16 numbers in FP32; others as before."""
    import numpy as np
    import triton.language as tl

    if a.dtype.scalar != tl.bfloat16:
        return _originals["create_dot"](self, a, b, d, *rest)
    wide = [(x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
    return type(d)(np.matmul(*wide) + d.data, d.dtype.scalar)


def _take_plain_strings() -> None:
    """Triton 3.7 asks for formats as constants, which its interpreter has unwrapped."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    original = TritonSemantic.dot_scaled

    def wrapped(self: Any, *args: Any) -> Any:
        return original(self, *(tl.constexpr(a) if isinstance(a, str) else a for a in args))

    TritonSemantic.dot_scaled = wrapped


def dot_scaled(
    self: Any,
    a: Any,
    a_scale: Any,
    a_format: Any,
    b: Any,
    b_scale: Any,
    b_format: Any,
    fast_math: bool,
    a_k_pack: bool,
    b_k_pack: bool,
    d: Any,
) -> Any:
    """FP32 values of both operands, their product, and the sum with `d`."""
    import numpy as np

    assert (a_k_pack, b_k_pack, a_format) == (True, True, b_format)
    a_MR = _decode(a.data, a_scale, a_format)
    b_NR = _decode(np.ascontiguousarray(b.data.T), b_scale, b_format)
    return type(d)(np.matmul(a_MR, b_NR.T) + d.data, d.dtype.scalar)


def _decode(codes: Any, scale: Any, format: Any) -> Any:
    import numpy as np
    import torch
    import triton.language as tl

    raw = torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8).copy())
    if format.name == "E2M1":
        pairs = torch.stack((raw & 15, raw >> 4), -1).flatten(1)
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        values = torch.where(pairs < 8, 1.0, -1.0) * magnitudes[(pairs & 7).long()]
    else:
        assert format.name == "E4M3", format
        values = raw.view(torch.float8_e4m3fn).float()
    raw = torch.from_numpy(np.ascontiguousarray(scale.data).view(np.uint8).copy())
    e4m3 = scale.dtype.scalar == tl.float8e4nv
    scales = raw.view(torch.float8_e4m3fn if e4m3 else torch.float8_e8m0fnu).float()
    return (values * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)).numpy()
