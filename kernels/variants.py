"""Every way in which the kernels are compiled, for `kernels.check` and its tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels import dequantize, mx
from kernels.amax import amax_kernel
from kernels.aot import TARGETS, Variant
from kernels.blocks import NUM_WARPS, TILE_ELEMENTS
from kernels.dequantize import dequantize_kernel
from kernels.gemm_variants import gemm_variants
from kernels.hadamard import sign_bits
from kernels.nvfp4 import NUM_PARAMETERS, global_scales_kernel
from kernels.rowcol import quantize_rowcol_kernel
from kernels.transpose import transpose_codes_kernel
from kernels.weight import quantize_weight_kernel

# The signs only exchange sums and differences; any will do.
_SIGNS = sign_bits((1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1))
_KEY = ("i32",) * 5
CODES = 4.5 / 8
"""Bytes of an element of NVFP4, its share of the block scale included."""
_NEAREST = r"cvt\.rn\.satfinite\.e2m1x2\.f32"
_STOCHASTIC = r"cvt\.rs\.satfinite\.e2m1x4\.f32"
_ANY_HARDWARE = r"cvt\.r[ns]\.satfinite\.e2m1"


def _converts(copies: list[int], elements: int, rht: bool = False) -> dict[int, dict[str, int]]:
    """Conversions and fused multiply-adds that a thread of `elements` elements needs, by target."""
    nearest = sum(elements // 2 for c in copies if c == 1)
    stochastic = sum(elements // 4 for c in copies if c == 2)
    required = {}
    for target in TARGETS:
        wanted = {_NEAREST: nearest if target >= 100 else 0}
        wanted[_STOCHASTIC] = stochastic if target in (100, 103) else 0
        packed = 2 if target >= 100 else 1
        suffix = "f32x2" if target >= 100 else "f32"
        wanted[rf"fma\.rn\.{suffix} "] = len(copies) * elements // packed
        wanted[rf"(add|sub)\.rn\.{suffix} "] = 4 * elements // packed if rht else 0
        required[target] = {pattern: least for pattern, least in wanted.items() if least}
    return required


_FORBIDDEN = {90: (_ANY_HARDWARE, r"f32x2"), 120: (_STOCHASTIC,)}


def _by_blocks(
    name: str,
    kernel: Any,
    signature: Mapping[str, Any],
    bytes_per_element: float,
    constants: Mapping[str, Any] | None = None,
    **more: Any,
) -> Variant:
    """A kernel whose threads own 16 x 16 elements; `signature` without the matrix's size."""
    return Variant(
        name=name,
        kernel=kernel,
        signature={**signature, "num_rows": "i32", "num_columns": "i32"},
        constants={"WARPS": NUM_WARPS, **(constants or {})},
        num_warps=NUM_WARPS,
        elements=TILE_ELEMENTS,
        bytes_per_element=bytes_per_element,
        **more,
    )


def _words(bf16: bool) -> tuple[str, int]:
    """Type of a pointer to the words of a matrix, and the bytes of its elements."""
    return ("*i32", 2) if bf16 else ("*fp32", 4)


def _rowcol(name: str, row: int, column: int, *, bf16: bool = True, signs: int = _SIGNS) -> Variant:
    copies = [c for c in (row, column) if c]
    words, size = _words(bf16)
    made = {"params_ptr": "*fp32", "codes_ptr": "*i32", "scales_ptr": "*u8", "key": _KEY}
    both = {f"{copy}_{key}": value for copy in ("row", "col") for key, value in made.items()}
    return _by_blocks(
        name,
        quantize_rowcol_kernel,
        {"x_ptr": words, **both},
        size + len(copies) * CODES,
        {"ROW": row, "COLUMN": column, "SIGNS": signs, "SWIZZLED": True, "BF16": bf16},
        required=_converts(copies, 256, rht=bool(column) and signs >= 0),
        forbidden=_FORBIDDEN,
    )


def _amax(name: str, signs: int, bf16: bool = True) -> Variant:
    words, size = _words(bf16)
    return _by_blocks(
        name,
        amax_kernel,
        {"x_ptr": words, "amax_ptr": "*i32", "nonfinite_ptr": "*i64"},
        size,
        {"SIGNS": signs, "BF16": bf16},
        cold=r"REDG?\..*ADD",
    )


def _weight(name: str, bf16: bool = True) -> Variant:
    words, size = _words(bf16)
    made = {"codes_ptr": "*i32", "scales_ptr": "*u8"}
    transposed = {f"transposed_{key}": value for key, value in made.items()}
    return _by_blocks(
        name,
        quantize_weight_kernel,
        {"w_ptr": words, "params_ptr": "*fp32", **made, **transposed},
        size + 2 * CODES,
        {"SWIZZLED": True, "BF16": bf16},
        required=_converts([1], 256),
        forbidden=_FORBIDDEN,
    )


def _transpose() -> Variant:
    signature = {"codes_ptr": "*i32", "out_ptr": "*i32"}
    return _by_blocks("transpose codes", transpose_codes_kernel, signature, 1)


def _dequantize(name: str, bits: int, block: int, e8m0: bool) -> Variant:
    return Variant(
        name=name,
        kernel=dequantize_kernel,
        signature={
            "codes_ptr": "*u8",
            "scales_ptr": "*u8",
            "global_scale_ptr": "*fp32",
            "out_ptr": "*bf16",
            "num_rows": "i32",
            "num_columns": "i32",
        },
        constants={
            "BITS": bits,
            "BLOCK": block,
            "E8M0": e8m0,
            "SWIZZLED": False,
            "GLOBAL": False,
            "ROWS": dequantize.ROWS,
            "COLUMNS": dequantize.COLUMNS,
        },
        num_warps=NUM_WARPS,
        elements=dequantize.ROWS * dequantize.COLUMNS,
        bytes_per_element=2 + bits / 8 + 1 / block,
    )


def _unswizzle() -> Variant:
    return Variant(
        name="unswizzle",
        kernel=dequantize.unswizzle_kernel,
        signature={
            "swizzled_ptr": "*u8",
            "out_ptr": "*u8",
            "num_rows": "i32",
            "num_columns": "i32",
        },
        constants={"ROWS": 128, "COLUMNS": 32},
        num_warps=NUM_WARPS,
        elements=128 * 32,
        bytes_per_element=2,
    )


def _mx(name: str, e2m1: bool, column: bool, stochastic: bool = False) -> Variant:
    per_thread = mx.TILE * mx.TILE // (32 * mx.NUM_WARPS)
    return Variant(
        name=name,
        kernel=mx.quantize_mx_kernel,
        signature={
            "x_ptr": "*bf16",
            "num_tokens": "i32",
            "num_features": "i32",
            "codes_ptr": "*i32" if e2m1 else "*u8",
            "scales_ptr": "*u8",
            "key": _KEY,
        },
        constants={
            "E2M1": e2m1,
            "COLUMN": column,
            "UP": True,
            "STOCHASTIC": stochastic,
            "SIGNS": -1,
            "SWIZZLED": True,
            "TILE": mx.TILE,
        },
        num_warps=mx.NUM_WARPS,
        elements=mx.TILE * mx.TILE,
        bytes_per_element=2 + (0.5 if e2m1 else 1) + 1 / 32,
        required=_converts([2 if stochastic else 1], per_thread) if e2m1 else {},
        forbidden=_FORBIDDEN if e2m1 else {},
    )


def _global_scales() -> Variant:
    """One program a tensor: the count is of no weight, the divisions' rounding is."""
    return Variant(
        name="global scales",
        kernel=global_scales_kernel,
        signature={"amax_ptr": "*fp32", "largest_ptr": "*fp32", "params_ptr": "*fp32"},
        constants={"STRIDE": NUM_PARAMETERS},
        num_warps=4,
        elements=128,
        bytes_per_element=4,
        required={target: {r"div\.rn\.f32|rcp\.rn\.f32": 3} for target in TARGETS},
        forbidden=dict.fromkeys(TARGETS, (r"div\.full", r"div\.approx", r"rcp\.approx")),
    )


def variants() -> list[Variant]:
    """All variants, in the order of the table."""
    return [
        _amax("amax", -1),
        _amax("amax with RHT", _SIGNS),
        _amax("amax with RHT FP32", _SIGNS, bf16=False),
        _rowcol("rowcol RNE+RNE", 1, 1),
        _rowcol("rowcol SR+SR", 2, 2),
        _rowcol("row RNE", 1, 0),
        _rowcol("column RNE without RHT", 0, 1, signs=-1),
        _weight("weight 16x16"),
        _weight("weight 16x16 FP32", bf16=False),
        _transpose(),
        _global_scales(),
        _dequantize("dequantize NVFP4", 4, 16, False),
        _dequantize("dequantize MXFP4", 4, 32, True),
        _dequantize("dequantize MXFP8", 8, 32, True),
        _unswizzle(),
        _mx("MXFP8 row", False, False),
        _mx("MXFP8 column", False, True),
        _mx("MXFP4 row RNE", True, False),
        _mx("MXFP4 column SR", True, True, True),
        _rowcol("rowcol RNE+RNE FP32", 1, 1, bf16=False),
        _rowcol("rowcol SR+SR FP32", 2, 2, bf16=False),
        *gemm_variants(),
    ]
