"""`quant` with Triton's kernels, in the process in which Triton interprets: CPU tensors there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kernels import dispatch, gemm
from kernels.dispatch import Device
from quant import Precision, apply_recipe, named_recipe
from quant.backend import backend
from quant.copies import RowCol, quantize_rowcol, quantize_weight
from quant.quantize import QuantizedTensor, amax_and_nonfinite, dequantize, quantize
from tests.kernels import interpreted_dot


def one(x: Tensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    """`quantize` by Triton."""
    with backend("triton"):
        return quantize(x, *args, **kwargs)


def rowcol(x: Tensor, *args: Any, **kwargs: Any) -> RowCol:
    """`quantize_rowcol` by Triton."""
    with backend("triton"):
        return quantize_rowcol(x, *args, **kwargs)


def weight(w: Tensor, *args: Any, **kwargs: Any) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`quantize_weight` by Triton."""
    with backend("triton"):
        return quantize_weight(w, *args, **kwargs)


def values(q: QuantizedTensor, dtype: torch.dtype, global_scale: bool) -> Tensor:
    """`dequantize` by Triton."""
    with backend("triton"):
        return dequantize(q, dtype, global_scale=global_scale)


def amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """`amax_and_nonfinite` by Triton."""
    with backend("triton"):
        return amax_and_nonfinite(x)


@contextmanager
def on_a_card(capability: tuple) -> Iterator[None]:
    """The table's choice as on a card of `capability`.

    cuBLAS cannot be interpreted: the table's other rows stand.
    """
    interpreted_dot.mend()
    described, table = dispatch.describe, dispatch.TABLE
    dispatch.describe = lambda device: Device("cuda", capability)
    dispatch.TABLE = table[1:]
    dispatch.choose_on.cache_clear()
    try:
        with backend("triton"):
            yield
    finally:
        dispatch.describe, dispatch.TABLE = described, table
        dispatch.choose_on.cache_clear()


def step(x_TK: Tensor, w_NK: Tensor, dy_TN: Tensor, recipe: str, capability: tuple) -> tuple:
    """y, dx and dW of a linear as on a card of `capability`, the table's word for it, and bytes."""
    with on_a_card(capability):
        return _step(x_TK, w_NK, dy_TN, recipe)


def sums(
    inputs: list[tuple[Tensor, Tensor]], w_NK: Tensor, recipe: str, capability: tuple, adds: bool
) -> tuple[Tensor, int]:
    """dW summed over micro-batches of x and dy; and how often a kernel added its product itself."""
    precision = _precision(w_NK, recipe)
    precision.adds_weight_gradients = bool(adds)
    layer, plain, added = precision.layers["blocks.0.up"], gemm.gemm, []

    def noted(a: Any, b: Any, **options: Any) -> Tensor:
        added.append(options["accumulate"])
        return plain(a, b, **options)

    gemm.gemm = noted
    try:
        with on_a_card(capability):
            for index, (x_TK, dy_TN) in enumerate(inputs):
                precision.begin(3, index)
                layer(x_TK).backward(dy_TN)
    finally:
        gemm.gemm = plain
    assert layer.weight.grad is not None
    return layer.weight.grad, sum(added)


def _step(x_TK: Tensor, w_NK: Tensor, dy_TN: Tensor, recipe: str) -> tuple:
    precision = _precision(w_NK, recipe)
    layer = precision.layers["blocks.0.up"]
    precision.statistics.request()
    precision.begin(3, 1)
    x = x_TK.clone().requires_grad_()
    y = layer(x)
    y.backward(dy_TN)
    statistics = precision.statistics.collect()
    row = precision.table()[0]
    return y.detach(), x.grad, layer.weight.grad, row.backend, statistics, precision.nonfinite()


def _precision(w_NK: Tensor, recipe: str) -> Precision:
    """A model of one linear with this weight, under a recipe."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": linear_of(w_NK)})])})
    made = named_recipe(recipe).with_blocks(first=0, last=0)
    return apply_recipe(model, made, num_blocks=1, seed=5)


def linear_of(w_NK: Tensor) -> nn.Linear:
    """A linear with this weight."""
    linear = nn.Linear(w_NK.shape[1], w_NK.shape[0], bias=False)
    linear.weight = nn.Parameter(w_NK.clone())
    return linear


def reference_step(x_TK: Tensor, w_NK: Tensor, dy_TN: Tensor, recipe: str) -> tuple:
    """The same in plain torch."""
    with backend("reference"):
        return _step(x_TK, w_NK, dy_TN, recipe)
