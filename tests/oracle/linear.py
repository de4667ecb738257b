"""The three GEMMs of a linear, operand by operand, and how far FP32 may stray from them.

    Fprop  y_TN  = x_TK @ w_NK^T      x in rows, RNE          w in 16x16
    Dgrad  dx_TK = dy_TN @ w_NK       dy in rows, SR          the same codes of w, transposed
    Wgrad  dw_NK = dy_TN^T @ x_TK     dy^T: RHT, then SR      x^T: RHT, then RNE

**The bound.** Every operand's value (code times block scale) fits BF16, so that a product of two
is exact in FP32, and FP64 sums of them are exact for this purpose. FP32 addition of n products, in
any order and with or without fused multiply-adds, errs by at most g(n - 1) sum |a b|, with
g(k) = k u / (1 - k u) and u = 2^-24 (Higham, Accuracy and Stability, section 4.2). Multiplying by
two tensor scales rounds twice more, or three times if their product is rounded first. Hence

    |computed - exact| <= g(n + 2) sum |a b|.

Rounding is monotone: what is then rounded to BF16 lies between the rounded ends of that interval.

Legend: T tokens, K input features, N output features, M rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tests.oracle import numbers, quantizers
from tests.oracle.philox import COLUMN, GRADIENT, ROW, Key
from tests.oracle.quantizers import Operand

UNIT = 2.0**-24
"""FP32's unit roundoff."""


@dataclass(frozen=True)
class Formats:
    """What multiplies in the forward pass and in the two GEMMs of the backward pass."""

    forward: str
    backward: str


def recipe_table(
    recipe: str, linears: Iterable[str], num_blocks: int, first: int, last: int, mode: str
) -> dict[str, Formats]:
    """The formats of each linear under ``nvfp4_paper``, ``nvfp4`` or ``bf16``.

    ``first`` and ``last`` blocks stay in BF16, and so does all that stands in no block. ``mode``:
    ``recipe``, or the late switch: ``bf16`` or ``bf16_forward``.
    """
    table = {}
    for name in linears:
        parts = name.split(".")
        format = "bf16"
        if parts[0] == "blocks" and first <= int(parts[1]) < num_blocks - last:
            format = _format_in_block(recipe, ".".join(parts[2:]))
        table[name] = Formats(
            forward=format if mode == "recipe" else "bf16",
            backward="bf16" if mode == "bf16" else format,
        )
    return table


def _format_in_block(recipe: str, kind: str) -> str:
    if recipe == "bf16" or kind == "mamba.in_dt":
        return "bf16"
    if recipe == "nvfp4":
        return {"attention.qkv": "bf16", "attention.o": "bf16", "mamba.out": "mxfp8"}.get(
            kind, "nvfp4"
        )
    assert recipe == "nvfp4_paper"
    return "nvfp4"


@dataclass(frozen=True)
class Product:
    """A GEMM's result: ``exact`` in FP64, and the ``bound`` of what FP32 makes of it, [M, N]."""

    exact: np.ndarray
    bound: np.ndarray

    def fp32(self) -> np.ndarray:
        return self.exact.astype(np.float32)

    def bf16(self) -> np.ndarray:
        """FP32 array of BF16 values."""
        return numbers.bf16(self.exact).astype(np.float32)

    def allows_bf16(self, value: np.ndarray) -> np.ndarray:
        """Where ``value`` may be the BF16 rounding of the FP32 result, bool [M, N]."""
        low, high = numbers.bf16(self.exact - self.bound), numbers.bf16(self.exact + self.bound)
        return (low <= value) & (value <= high)

    def allows_sum(self, value: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Where ``value`` may be the FP32 sum of ``before`` and the FP32 result, bool [M, N]."""
        low = (before + (self.exact - self.bound)).astype(np.float32)
        high = (before + (self.exact + self.bound)).astype(np.float32)
        return (low <= value) & (value <= high)


@dataclass(frozen=True)
class Site:
    """Whose GEMMs these are: all that names their random bits."""

    seed: int
    step: int
    microbatch: int
    layer: int


class Rules:
    """The choices that a wrong implementation gets wrong, one method each.

    Tests override one at a time to see that a comparison notices.
    """

    def key(self, site: Site, copy: int) -> Key:
        """The key of a gradient's row or column copy."""
        return Key(site.seed, site.step, site.microbatch, site.layer, GRADIENT, copy)

    def column(self, x_TK: np.ndarray) -> np.ndarray:
        """What NVFP4 quantizes for Wgrad: [K, T'] in tiles of 16 tokens."""
        return quantizers.rht_transpose(x_TK)

    def weight(self, name: str, weight_NK: np.ndarray) -> np.ndarray:
        """The weight that is quantized: the present one."""
        return weight_NK

    def tensor_scale(self, a: Operand, b: Operand) -> float:
        """What multiplies the sum of products of block-scaled values."""
        scale = 1.0
        for operand in (a, b):
            if operand.global_scale is not None:
                scale *= float(operand.global_scale)
        return scale

    def weight_gradient(self, dw: Product) -> Product:
        """FP32 from the GEMM on: nothing is rounded."""
        return dw


def gemm(a_MK: Operand, b_NK: Operand, rules: Rules) -> Product:
    """a @ b^T, a block of 16 of the summed dimension after the other."""
    rows, columns, length = len(a_MK.values), len(b_NK.values), a_MK.values.shape[1]
    total, magnitude = np.zeros((rows, columns)), np.zeros((rows, columns))
    for start in range(0, length, 16):
        a, b = a_MK.values[:, start : start + 16], b_NK.values[:, start : start + 16]
        total += np.einsum("mk,nk->mn", a, b)
        magnitude += np.einsum("mk,nk->mn", np.abs(a), np.abs(b))
    scale = rules.tensor_scale(a_MK, b_NK)
    count = length + 2
    return Product(total * scale, count * UNIT / (1 - count * UNIT) * magnitude * scale)


def forward_operands(format: str, x_TK: np.ndarray, w_NK: np.ndarray) -> dict[str, Operand]:
    """``x`` and ``w``, blocks along K."""
    if format == "bf16":
        return {"x": quantizers.bf16(x_TK), "w": quantizers.bf16(w_NK)}
    if format == "mxfp8":
        return {"x": quantizers.mxfp8(x_TK), "w": quantizers.mxfp8(w_NK)}
    return {"x": quantizers.nvfp4(x_TK), "w": quantizers.nvfp4(w_NK, block_rows=16)}


def backward_operands(
    format: str, x_TK: np.ndarray, w_NK: np.ndarray, dy_TN: np.ndarray, site: Site, rules: Rules
) -> dict[str, Operand]:
    """``dy`` and ``w_t``, blocks along N; ``dy_t`` and ``x_t``, blocks along tokens."""
    if format == "bf16":
        return {
            name: quantizers.bf16(value)
            for name, value in (("dy", dy_TN), ("w_t", w_NK.T), ("dy_t", dy_TN.T), ("x_t", x_TK.T))
        }
    if format == "mxfp8":
        return {
            "dy": quantizers.mxfp8(dy_TN),
            "w_t": quantizers.mxfp8(w_NK.T),
            "dy_t": quantizers.mxfp8(quantizers.padded_transpose(dy_TN, 32)),
            "x_t": quantizers.mxfp8(quantizers.padded_transpose(x_TK, 32)),
        }
    return {
        "dy": quantizers.nvfp4(dy_TN, key=rules.key(site, ROW)),
        "w_t": quantizers.nvfp4(w_NK, block_rows=16).transpose(),
        "dy_t": quantizers.nvfp4(rules.column(dy_TN), key=rules.key(site, COLUMN)),
        "x_t": quantizers.nvfp4(rules.column(x_TK)),
    }
