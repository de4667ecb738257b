"""Precision is policy: swap a model's linears for quantized ones, by name and block position.

The model declares plain `nn.Linear` leaves with names; a recipe says what each becomes. BF16
linears are swapped too, so that their weight gradients are FP32 from the GEMM on.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from quant.gemm import BACKENDS, exact_in_bf16
from quant.linear import MODES, QuantLinear, Shared
from quant.recipe import LINEAR_RECIPES, ROLES, LinearRecipe, Recipe
from quant.statistics import Statistics

_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
_ALIGNMENT = 16  # what FP8 and FP4 tensor cores ask of the reduced dimension
_FEATURES = ("in_features", "out_features")
_BLOCKS_LIE_ALONG: Mapping[str, tuple[str, ...]] = {
    "input": ("in_features",),
    "weight": ("in_features",),
    "dgrad_gradient": ("out_features",),
    "dgrad_weight": ("out_features",),
    "wgrad_gradient": (),  # along tokens, which are padded
    "wgrad_input": (),
}


@dataclass(frozen=True)
class LayerPrecision:
    """One row of `Precision.table`: what the operands of each GEMM are, and what runs it."""

    name: str
    fprop: str
    dgrad: str
    wgrad: str
    backend: str


def summary(table: Sequence[LayerPrecision]) -> str:
    """How many linears multiply what in Fprop, and by which backend, in one line."""
    kinds = Counter(f"{row.fprop} ({row.backend})" for row in table)
    return ", ".join(f"{count} linears {kind}" for kind, count in kinds.items())


class Precision:
    """The handle on a model's precision that a training loop holds.

    Attributes:
        recipe: the recipe applied.
        layers: every linear of the model by name, in the model's order.
    """

    def __init__(self, recipe: Recipe, layers: dict[str, QuantLinear], shared: Shared) -> None:
        self.recipe = recipe
        self.layers = layers
        self._shared = shared

    def begin(self, step: int, microbatch: int, *, counts: bool = True) -> None:
        """Name the micro-batch that comes next; its stochastic rounding bits follow from this.

        Call before each forward pass, and not again before its backward pass is done.

        Args:
            step: optimizer step.
            microbatch: index within the global batch, not within this rank.
            counts: False for one that only keeps this rank in step with others: neither statistics
                nor the count of non-finite values know of it.
        """
        self._shared.moment = replace(
            self._shared.moment, step=step, microbatch=microbatch, counts=counts
        )
        self._shared.statistics.begin(step)

    @property
    def mode(self) -> str:
        """ "recipe", or "bf16" or "bf16_forward" in place of it (the late switch).

        A switch changes nothing else: neither the random bits nor the layers' indices.
        """
        return self._shared.moment.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown precision mode {mode!r}: choose from {MODES}")
        self._shared.moment = replace(self._shared.moment, mode=mode)

    @contextmanager
    def override(self, mode: str) -> Iterator[None]:
        """Another mode inside a `with` block, as for evaluation in BF16.

        A backward pass belongs to its forward pass: it keeps that one's mode wherever it runs.
        """
        before = self.mode
        self.mode = mode
        try:
            yield
        finally:
            self.mode = before

    @property
    def adds_weight_gradients(self) -> bool:
        """Whether Wgrad adds to `weight.grad` in its own epilogue, where there is one already.

        It spares a gradient's memory, and half of its traffic, in each micro-batch but the first;
        the sums keep their bits. For loops that call `backward()` alone: `torch.autograd.grad`
        would miss these gradients. A weight with hooks is left to autograd, and so is a step whose
        statistics are taken.
        """
        return self._shared.adds_weight_gradients

    @adds_weight_gradients.setter
    def adds_weight_gradients(self, value: bool) -> None:
        self._shared.adds_weight_gradients = value

    @property
    def statistics(self) -> Statistics:
        """What quantization does to each layer: set `every` or call `request`, then `collect`."""
        return self._shared.statistics

    def nonfinite(self) -> Tensor:
        """NaN and infinite elements met by the quantizers since the last call: int64 scalar.

        Quantizing hides them, so a step in which this is not 0 must be skipped. Counted in
        training's passes, again in a recompute, and whenever a weight is quantized; not in BF16
        GEMMs, which hand them on.
        """
        count, self._shared.nonfinite = self._shared.nonfinite, None
        return torch.zeros((), dtype=torch.int64) if count is None else count

    def invalidate(self) -> None:
        """Drop all quantized weights.

        Needed only where weights change unseen by autograd's version counter: under FSDP2, after
        each optimizer step and each load.
        """
        for layer in self.layers.values():
            layer.cache.clear()

    @property
    def cache_nbytes(self) -> int:
        """Bytes that the quantized copies of the weights hold."""
        return sum(layer.cache.nbytes for layer in self.layers.values())

    def table(
        self, device: torch.device | None = None, num_tokens: int | None = None
    ) -> list[LayerPrecision]:
        """What runs where in the present mode, a row per linear.

        Args:
            device: where the model will run; None for where it is.
            num_tokens: of a micro-batch; None for those of the last call.
        """
        return [
            LayerPrecision(
                name,
                *(layer.recipe.fprop, layer.recipe.dgrad, layer.recipe.wgrad),
                layer.backend(device, num_tokens),
            )
            for name, layer in self.layers.items()
        ]

    def __str__(self) -> str:
        """The table as text, for the log."""
        header = ("linear", "Fprop", "Dgrad", "Wgrad", "backend")
        rows = [header] + [
            (row.name, row.fprop, row.dgrad, row.wgrad, row.backend) for row in self.table()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def apply_recipe(
    model: nn.Module,
    recipe: Recipe,
    *,
    num_blocks: int,
    seed: int,
    backend: str | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> Precision:
    """Swap every linear of `model`, in place, for a `QuantLinear` on the same Parameter.

    Call it before the model is wrapped or sharded. Names of parameters do not change.

    Args:
        model: its linears have no bias. A linear named `...blocks.<i>....` stands in block i.
        recipe: see `quant.recipe`.
        num_blocks: blocks of the model, for the recipe's first and last BF16 blocks.
        seed: of the stochastic rounding.
        backend: None takes what suits the device; "reference" is for tests.
        weight_dtype: what FP32 weights are rounded to before they are quantized: BF16 where the
            model computes in it, as weights that are gathered from other ranks come in BF16.

    Raises:
        ValueError: a linear with a bias, a size that its format cannot take, a recipe that leaves
            nothing to quantize, a recipe applied twice, an unknown backend. Nothing is swapped
            then.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: choose from {sorted(BACKENDS)}")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    recipes = {name: linear_recipe(recipe, name, num_blocks) for name in linears}
    for name, linear in linears.items():
        _check(name, linear, recipes[name])
    _check_something_left(recipe, num_blocks)
    shared = Shared(seed, backend, weight_dtype)
    layers = {}
    for index, (name, linear) in enumerate(linears.items()):
        if linear.weight.is_leaf and linear.weight.dtype != torch.float32:
            linear.weight.grad_dtype = torch.float32
        layer = QuantLinear(linear, name=name, index=index, recipe=recipes[name], shared=shared)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
        layers[name] = layer
    return Precision(recipe, layers, shared)


def linear_recipe(recipe: Recipe, name: str, num_blocks: int) -> LinearRecipe:
    """What `recipe` makes of the linear `name`: BF16 by position, else its first matching rule.

    Raises ValueError where the name's block is not among `num_blocks`.
    """
    match = _BLOCK.search(name)
    if match is None:
        return LINEAR_RECIPES["bf16"]
    block = int(match[1])
    if block >= num_blocks:
        raise ValueError(f"{name} lies outside num_blocks={num_blocks}: pass the model's own count")
    first, last = bf16_blocks(recipe, num_blocks)
    if block < first or block >= num_blocks - last:
        return LINEAR_RECIPES["bf16"]
    for pattern, rule in recipe.rules:
        if fnmatchcase(name, pattern):
            return rule
    return recipe.default


def bf16_blocks(recipe: Recipe, num_blocks: int) -> tuple[int, int]:
    """How many blocks at the start and at the end stay BF16."""

    def count(end: int | float) -> int:
        return end if isinstance(end, int) else math.ceil(round(end * num_blocks, 9))

    return count(recipe.first), count(recipe.last)


def _check_something_left(recipe: Recipe, num_blocks: int) -> None:
    first, last = bf16_blocks(recipe, num_blocks)
    if recipe.default.quantized and first + last >= num_blocks:
        raise ValueError(
            f"recipe {recipe.name} quantizes nothing: its first {first} and last {last} blocks "
            f"stay in BF16, and there are {num_blocks}; lower them with Recipe.with_blocks, or "
            "choose the recipe bf16"
        )


def _check(name: str, linear: nn.Linear, recipe: LinearRecipe) -> None:
    if not name:
        raise ValueError("the model is itself a linear, which cannot be swapped in place: wrap it")
    if isinstance(linear, QuantLinear):
        raise ValueError(f"{name}: a recipe is applied already; build the model anew")
    if linear.bias is not None:
        raise ValueError(f"{name} has a bias, which quantized linears do not take: use bias=False")
    for role in ROLES:
        format = recipe.operand(role).spec
        if format is None:
            continue
        if not exact_in_bf16(format):
            raise ValueError(
                f"{name}: no backend multiplies {format.name} exactly, its scales being any FP32 "
                f"number; choose a format whose scales are powers of two"
            )
        # FP8's last block of 128 may be a part of one; 4-bit and MX blocks must be whole.
        multiple = _ALIGNMENT if format.scale == "fp32" else format.block[1]
        for feature in _FEATURES if format.is_2d else _BLOCKS_LIE_ALONG[role]:
            size = getattr(linear, feature)
            if size % multiple:
                raise ValueError(
                    f"{name} ({linear.out_features} x {linear.in_features}): {role} in "
                    f"{format.name} needs {feature} to be a multiple of {multiple}, not {size}; "
                    f"change the size, or keep this linear in BF16 by a rule of the recipe"
                )
