"""The quantizers on a GPU: Triton's kernels, which give the bytes of the plain torch reference.

Each function here takes what its `refusal` lets through; the callers run plain torch for the rest,
and the reason is logged once. Triton itself is imported at the first call.

Legend: T tokens, K features, R rows.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernels.matrix import MAX_COLUMNS, MAX_ELEMENTS
from quant.formats import Format
from quant.rounding import RoundingKey

if TYPE_CHECKING:
    from kernels.matrix import Copy

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float32)


class Wanted(NamedTuple):
    """How one copy of a tensor is to be made.

    Attributes:
        amax: FP32 scalar in place of the tensor's own, or None.
        largest: the code that the largest magnitude becomes: 6, or less with a guard.
        key: of stochastic rounding; None rounds to nearest.
        signs: of a Hadamard transform along the blocks, or None.
    """

    format: Format
    amax: Tensor | None = None
    largest: float = 6.0
    key: RoundingKey | None = None
    signs: tuple[int, ...] | None = None

    @property
    def random(self) -> tuple[int, ...] | None:
        """The words that the kernels take."""
        return None if self.key is None else (*self.key.words, *self.key.counter)


@functools.cache
def note(name: str, why: str) -> None:
    """Log once why plain torch runs."""
    log.warning("%s runs in plain torch on the GPU: %s", name, why)


def accepts(name: str, why: str | None) -> bool:
    """Whether the kernel runs; if not, the reason is logged."""
    if why is not None:
        note(name, why)
    return why is None


def matrix_refusal(x_RK: Tensor, multiple: int = 16) -> str | None:
    """Why no kernel reads `x`; None if they do."""
    if x_RK.dtype not in _DTYPES:
        return f"{x_RK.dtype} is not BF16 or FP32"
    if x_RK.shape[-1] % multiple:
        return f"{x_RK.shape[-1]} columns are not a multiple of {multiple}"
    if x_RK.numel() >= MAX_ELEMENTS:
        return "2^32 elements or more"
    if x_RK.shape[-1] > MAX_COLUMNS:
        return f"more than {MAX_COLUMNS} columns"
    return None


def copy_refusal(x_RK: Tensor, wanted: Wanted, offset: int = 0) -> str | None:
    """Why no kernel makes a copy of `x`; None if one does."""
    format = wanted.format
    if format.scale == "fp32":
        return f"{format.name} has FP32 scales"
    block = format.block[1]
    if wanted.signs is not None and len(wanted.signs) != block:
        return f"a Hadamard transform of {len(wanted.signs)} with blocks of {block}"
    if wanted.key is not None and offset:
        return "stochastic rounding of a part of a tensor"
    if format.scale == "e8m0" and x_RK.shape[0] > MAX_COLUMNS:
        return f"more than {MAX_COLUMNS} rows, which a column copy of {format.name} lays across"
    if format.is_2d and x_RK.shape[0] % 16:
        return f"{x_RK.shape[0]} rows are not a multiple of 16"
    return matrix_refusal(x_RK, block)


def amax_and_nonfinite(
    x_RK: Tensor, signs: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Amax of x and of its transform (FP32 scalars), and the number of non-finite elements."""
    from kernels.amax import amax_and_nonfinite

    (amax_x, amax_y), nonfinite = amax_and_nonfinite(x_RK, signs)
    return amax_x, amax_y, nonfinite


def quantize(x_RK: Tensor, wanted: Wanted, swizzled: bool) -> tuple[Copy, Tensor | None]:
    """The row copy of a matrix, and its S_dec."""
    if wanted.format.is_2d:
        (row, _), decode = quantize_weight(x_RK, wanted.amax, swizzled)
        return row, decode
    if not wanted.format.has_global_scale:
        return _mx(x_RK, wanted, swizzled, column=False), None
    amax = amax_and_nonfinite(x_RK)[0] if wanted.amax is None else wanted.amax
    copies, decodes = nvfp4(x_RK, wanted._replace(amax=amax), None, swizzled)
    assert copies[0] is not None
    return copies[0], decodes[0]


def rowcol(
    x_TK: Tensor, row: Wanted | None, column: Wanted | None, swizzled: bool
) -> tuple[Copy | None, Copy | None, Tensor | None, Tensor | None, Tensor]:
    """Row copy, column copy, S_dec of each, and the number of non-finite elements of x."""
    tensor_scaled = [w if w and w.format.has_global_scale else None for w in (row, column)]
    signs = tensor_scaled[1].signs if tensor_scaled[1] is not None else None
    amax_x, amax_y, nonfinite = amax_and_nonfinite(x_TK, signs)
    measured = (amax_x, amax_x if signs is None else amax_y)
    to_row, to_column = (
        w if w is None or w.amax is not None else w._replace(amax=amax)
        for w, amax in zip(tensor_scaled, measured, strict=True)
    )
    copies, decodes = nvfp4(x_TK, to_row, to_column, swizzled)
    row_copy, column_copy = copies
    if row is not None and row_copy is None:
        row_copy = _mx(x_TK, row, swizzled, column=False)
    if column is not None and column_copy is None:
        column_copy = _mx(x_TK, column, swizzled, column=True)
    return row_copy, column_copy, *decodes, nonfinite


def nvfp4(
    x_TK: Tensor, row: Wanted | None, column: Wanted | None, swizzled: bool
) -> tuple[tuple[Copy | None, Copy | None], tuple[Tensor | None, Tensor | None]]:
    """Row and column copy in one pass, and S_dec of each; every wanted copy has its amax."""
    from kernels.nvfp4 import global_scales
    from kernels.rowcol import quantize_rowcol

    copies = [w for w in (row, column) if w is not None]
    if not copies:
        return (None, None), (None, None)
    amax = torch.stack([w.amax for w in copies if w.amax is not None])
    made = iter(global_scales(amax, [w.largest for w in copies]))
    row_params, column_params = (None if w is None else next(made) for w in (row, column))
    result = quantize_rowcol(
        x_TK,
        row_params=row_params,
        column_params=column_params,
        row_random=row.random if row else None,
        column_random=column.random if column else None,
        signs=column.signs if column else None,
        swizzled=swizzled,
    )
    decodes = (None if p is None else p[0] for p in (row_params, column_params))
    return result, (next(decodes), next(decodes))


def _mx(x_TK: Tensor, wanted: Wanted, swizzled: bool, column: bool) -> Copy:
    from kernels.mx import quantize_mx

    return quantize_mx(
        x_TK,
        element=wanted.format.element,
        column=column,
        round_up=wanted.format.scale_rounding == "up",
        random=wanted.random,
        signs=wanted.signs,
        swizzled=swizzled,
    )


def quantize_weight(
    w_NK: Tensor, amax: Tensor | None, swizzled: bool
) -> tuple[tuple[Copy, Copy], Tensor]:
    """Both copies of a weight with 16 x 16 scales, and their S_dec."""
    from kernels.nvfp4 import global_scales
    from kernels.weight import quantize_weight

    if amax is None:
        amax = amax_and_nonfinite(w_NK)[0]
    params = global_scales(amax.reshape(1), [6.0])[0]
    return quantize_weight(w_NK, params, swizzled=swizzled), params[0]


def dequantize(
    codes_RK: Tensor,
    scales: Tensor,
    swizzled: bool,
    format: Format,
    columns: int,
    global_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As `quant.quantize.dequantize`, of a matrix."""
    from kernels.dequantize import dequantize

    return dequantize(
        codes_RK,
        scales,
        columns=columns,
        block=format.block[1],
        global_scale=global_scale,
        dtype=dtype,
        swizzled=swizzled,
    )


def dequantize_refusal(format: Format, columns: int, dtype: torch.dtype) -> str | None:
    """Why no kernel dequantizes; None if one does."""
    if format.scale == "fp32":
        return f"{format.name} has FP32 scales"
    if columns % format.block[1]:
        return f"{columns} columns are not whole blocks of {format.block[1]}"
    return None if dtype in _DTYPES else f"{dtype} is not BF16 or FP32"
