"""Rules that are wrong in one way each: what the comparison has to notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tests.oracle import numbers, quantizers
from tests.oracle.linear import Product, Rules, Site
from tests.oracle.philox import COLUMN, ROW, Key
from tests.oracle.quantizers import Operand


class RowAndColumnKeysSwapped(Rules):
    def key(self, site: Site, copy: int) -> Key:
        return super().key(site, COLUMN if copy == ROW else ROW)


class RowKeyForBothCopies(Rules):
    def key(self, site: Site, copy: int) -> Key:
        return super().key(site, ROW)


class MicroBatchOffByOne(Rules):
    def key(self, site: Site, copy: int) -> Key:
        return super().key(replace(site, microbatch=site.microbatch + 1), copy)


class LayerOffByOne(Rules):
    def key(self, site: Site, copy: int) -> Key:
        return super().key(replace(site, layer=site.layer + 1), copy)


class StepOffByOne(Rules):
    def key(self, site: Site, copy: int) -> Key:
        return super().key(replace(site, step=site.step + 1), copy)


class SeedCutTo32Bits(Rules):
    def key(self, site: Site, copy: int) -> Key:
        return super().key(replace(site, seed=site.seed & 0xFFFFFFFF), copy)


class _CountedBeforeTransposing(Key):
    def bytes(self, rows: int, columns: int) -> np.ndarray:
        return super().bytes(columns, rows).T


class ColumnBitsCountedInTheRowCopy(Rules):
    def key(self, site: Site, copy: int) -> Key:
        key = super().key(site, copy)
        return _CountedBeforeTransposing(**vars(key)) if copy == COLUMN else key


class RoundToNearestInTheRowCopy(Rules):
    def key(self, site: Site, copy: int) -> Key | None:  # type: ignore[override]
        return super().key(site, copy) if copy == COLUMN else None


class NoHadamardTransform(Rules):
    def column(self, x_TK: np.ndarray) -> np.ndarray:
        return quantizers.padded_transpose(x_TK, 16)


class HadamardTransformNotRounded(Rules):
    def column(self, x_TK: np.ndarray) -> np.ndarray:
        tile = quantizers.padded_transpose(x_TK, 16).reshape(x_TK.shape[1], -1, 16)
        matrix = quantizers.SIGNS[:, None] * quantizers.hadamard16() / 4
        return (tile @ matrix).astype(np.float32).reshape(x_TK.shape[1], -1)


class HadamardTransformWithoutSigns(Rules):
    def column(self, x_TK: np.ndarray) -> np.ndarray:
        signs = np.resize(quantizers.SIGNS, len(x_TK)).astype(np.float32)
        return super().column(x_TK * signs[:, None])


class TensorScaleTwice(Rules):
    def tensor_scale(self, a: Operand, b: Operand) -> float:
        scale = super().tensor_scale(a, b)
        return scale * float(a.global_scale) if a.global_scale is not None else scale


class WeightGradientInBF16(Rules):
    def weight_gradient(self, dw: Product) -> Product:
        return Product(numbers.bf16(dw.exact), dw.bound)


class StaleWeights(Rules):
    """The quantized weights of another step."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.weights = weights

    def weight(self, name: str, weight_NK: np.ndarray) -> np.ndarray:
        return self.weights[f"{name}.weight"]


BOTH_GRADIENTS = {"dx", "dw", "codes of dy", "codes of dy_t"}
WEIGHT_GRADIENT = {"dw", "codes of dy_t", "codes of x_t"}
MUTANTS: list[tuple[Rules, set[str]]] = [
    (RowAndColumnKeysSwapped(), BOTH_GRADIENTS),
    (RowKeyForBothCopies(), {"dw", "codes of dy_t"}),
    (MicroBatchOffByOne(), BOTH_GRADIENTS),
    (LayerOffByOne(), BOTH_GRADIENTS),
    (StepOffByOne(), BOTH_GRADIENTS),
    (SeedCutTo32Bits(), BOTH_GRADIENTS),
    (ColumnBitsCountedInTheRowCopy(), {"dw", "codes of dy_t"}),
    (RoundToNearestInTheRowCopy(), {"dx", "codes of dy"}),
    (NoHadamardTransform(), WEIGHT_GRADIENT),
    (HadamardTransformNotRounded(), WEIGHT_GRADIENT),
    (HadamardTransformWithoutSigns(), WEIGHT_GRADIENT),
    (TensorScaleTwice(), {"y", "dx", "dw"}),
    (WeightGradientInBF16(), {"dw"}),
]
"""Each with all that must be seen to disagree, and nothing else may."""
