"""The two quantized copies of one tensor that a linear's three GEMMs read.

A row copy has its blocks along the features, a column copy along the tokens (stored transposed, as
FP4 tensor cores multiply K-major operands only). A weight's transposed copy serves Dgrad.

Legend: T tokens, K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu
from quant import gpu
from quant.backend import use_compiled, use_triton
from quant.formats import Format
from quant.hadamard import padded_tokens, resolve_signs, rht_transpose
from quant.quantize import (
    QuantizedTensor,
    Rounding,
    amax_and_nonfinite,
    amax_of,
    check_options,
    from_copy,
    quantize,
)
from quant.reference import largest_code
from quant.rounding import RoundingKey


class RowCol(NamedTuple):
    """Copies of one tensor [T, K].

    Attributes:
        row: [T, K], or None where none was asked for.
        column: [K, T padded], or None.
        nonfinite: int64 scalar, how many elements of the tensor are NaN or infinite.
    """

    row: QuantizedTensor | None
    column: QuantizedTensor | None
    nonfinite: Tensor


def quantize_rowcol(
    x_TK: Tensor,
    row: Format | None,
    column: Format | None,
    *,
    row_rounding: Rounding = "nearest",
    column_rounding: Rounding = "nearest",
    row_key: RoundingKey | None = None,
    column_key: RoundingKey | None = None,
    row_guard: bool = False,
    column_guard: bool = False,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
    column_rht: bool | int = False,
    signs: Sequence[int] | None = None,
    swizzled: bool = False,
) -> RowCol:
    """Quantize a matrix along its rows and along its columns.

    Without an RHT the tokens of the column copy are padded with zeros to a whole block; with one,
    to whole Hadamard tiles (see `rht_transpose`). Both operands of Wgrad get the same padding.
    Where an element's random bits are concerned, its index in the column copy is
    `k * padded T + t`.

    Args:
        x_TK: BF16, FP16 or FP32, two dimensions, any strides.
        row, column: format of each copy, or None for no copy.
        row_rounding, row_key, row_guard, row_amax: as in `quantize`; likewise for the column,
            whose amax is that of the transformed tensor.
        column_rht: False; True for tiles of 16; or the tile's size, 16 or 32.
        signs: the transform's signs; None takes the default.
        swizzled: give the block scales as tensor cores read them.

    Raises:
        ValueError: as `quantize` and `rht_transpose`.
    """
    if x_TK.dim() != 2:
        raise ValueError(f"quantize_rowcol takes [tokens, features], not {tuple(x_TK.shape)}")
    if use_triton(x_TK):
        to_row = _wanted(x_TK, row, row_amax, row_rounding, row_key, row_guard)
        to_column = _wanted(x_TK, column, column_amax, column_rounding, column_key, column_guard)
        if to_column is not None and column_rht:
            resolved = resolve_signs(signs, 16 if column_rht is True else column_rht)
            to_column = to_column._replace(signs=resolved)
        if gpu.accepts("quantize_rowcol", _refusal(x_TK, to_row, to_column)):
            return _by_triton(x_TK, to_row, to_column, swizzled)
    x_KT, amax_x, amax_y, nonfinite = _read(x_TK, column, column_rht, signs)
    row_copy = column_copy = None
    if row is not None:
        row_copy = quantize(
            x_TK,
            row,
            amax=_known_amax(row_amax, amax_x, row),
            rounding=row_rounding,
            key=row_key,
            guard=row_guard,
            swizzled=swizzled,
        )
    if column is not None:
        assert x_KT is not None
        column_copy = quantize(
            x_KT,
            column,
            amax=_known_amax(column_amax, amax_y, column),
            rounding=column_rounding,
            key=column_key,
            guard=column_guard,
            swizzled=swizzled,
        )
    return RowCol(row_copy, column_copy, nonfinite)


def _wanted(
    x_TK: Tensor,
    format: Format | None,
    amax: Tensor | None,
    rounding: Rounding,
    key: RoundingKey | None,
    guard: bool,
) -> gpu.Wanted | None:
    if format is None:
        return None
    check_options(x_TK, format, amax, rounding, key, 0, guard)
    if amax is not None:
        amax = amax.to(x_TK.device, torch.float32).reshape(())
    return gpu.Wanted(format, amax, largest_code(guard), key if rounding == "stochastic" else None)


def _refusal(x_TK: Tensor, row: gpu.Wanted | None, column: gpu.Wanted | None) -> str | None:
    for wanted in (row, column):
        if wanted is not None:
            why = "square blocks" if wanted.format.is_2d else gpu.copy_refusal(x_TK, wanted)
            if why is not None:
                return why
    return gpu.matrix_refusal(x_TK)


def _by_triton(
    x_TK: Tensor, row: gpu.Wanted | None, column: gpu.Wanted | None, swizzled: bool
) -> RowCol:
    row_copy, column_copy, row_decode, column_decode, nonfinite = gpu.rowcol(
        x_TK, row, column, swizzled
    )
    made_row = made_column = None
    if row is not None:
        assert row_copy is not None
        made_row = from_copy(row_copy, row_decode, row.format, x_TK.shape, swizzled)
    if column is not None:
        assert column_copy is not None
        padded = padded_tokens(x_TK.shape[0], column.format.block[1])
        shape = torch.Size((x_TK.shape[1], padded))
        made_column = from_copy(column_copy, column_decode, column.format, shape, swizzled)
    return RowCol(made_row, made_column, nonfinite)


def _known_amax(given: Tensor | None, measured: Tensor, format: Format) -> Tensor | None:
    return measured if given is None and format.has_global_scale else given


def _read(
    x_TK: Tensor, column: Format | None, rht: bool | int, signs: Sequence[int] | None
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """What the column copy is quantized from, the amax of x and of that, and x's non-finite count.

    The compiled transform finds all four in its one pass over x.
    """
    if column is not None and rht and use_compiled(x_TK):
        resolved = resolve_signs(signs, 16 if rht is True else rht)
        x_KT, (amax_x, amax_y), nonfinite = cpu.rht_transpose(x_TK, resolved)
        return x_KT, amax_x, amax_y, nonfinite
    amax_x, nonfinite = amax_and_nonfinite(x_TK)
    if column is None:
        return None, amax_x, amax_x, nonfinite
    x_KT = transposed_tokens(x_TK, column, rht, signs)
    return x_KT, amax_x, amax_of(x_KT) if rht else amax_x, nonfinite


def transposed_tokens(
    x_TK: Tensor, column: Format, rht: bool | int, signs: Sequence[int] | None = None
) -> Tensor:
    """What a column copy is quantized from: [K, padded T], BF16 after an RHT."""
    if rht:
        return rht_transpose(x_TK, signs, 16 if rht is True else rht)
    tokens = x_TK.shape[0]
    return functional.pad(x_TK.t(), (0, padded_tokens(tokens, column.block[1]) - tokens))


def quantize_weight(
    w_NK: Tensor, format: Format, amax: Tensor | None = None, *, swizzled: bool = False
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A weight for Fprop [N, K] and its transpose for Dgrad [K, N], rounded to nearest.

    In a format of two-dimensional blocks both hold the same values. In one of one-dimensional
    blocks the transpose is quantized a second time, along N.

    Raises:
        ValueError: as `quantize`; an odd N or K in a 4-bit format.
    """
    if w_NK.dim() != 2:
        raise ValueError(f"a weight has two dimensions, not {tuple(w_NK.shape)}")
    if format.is_2d and use_triton(w_NK):
        wanted = _wanted(w_NK, format, amax, "nearest", None, False)
        assert wanted is not None
        if gpu.accepts("quantize_weight", gpu.copy_refusal(w_NK, wanted)):
            copies, decode = gpu.quantize_weight(w_NK, wanted.amax, swizzled)
            made = [
                from_copy(copy, decode, format, torch.Size(shape), swizzled)
                for copy, shape in zip(copies, (w_NK.shape, w_NK.shape[::-1]), strict=True)
            ]
            return made[0], made[1]
    q = quantize(w_NK, format, amax=amax, swizzled=swizzled)
    if format.is_2d:
        return q, q.transpose()
    return q, quantize(w_NK.t(), format, amax=amax, swizzled=swizzled)
