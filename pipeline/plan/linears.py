"""A model's linears as the recipe makes them, and which tensor cores run each of their GEMMs.

The names, shapes and precisions are those of the very model and policy that train, built without
memory; which kernel runs a GEMM is the table's answer (`kernels.dispatch`) for a card of that
compute capability. So the plan cannot disagree with what runs.

Legend: T tokens of a micro-batch, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from kernels.dispatch import ELEMENT_BITS, Device, Problem, choose
from pipeline.config import Config, ConfigError
from pipeline.train.build import build_model, build_recipe
from quant import apply_recipe
from quant.formats import Format
from quant.gemm import format_name
from quant.linear import in_mode
from quant.recipe import LinearRecipe


@dataclass(frozen=True)
class Linear:
    """One linear: `blocks.<i>.` in front of a name says where it stands."""

    name: str
    in_features: int
    out_features: int
    recipe: LinearRecipe

    @property
    def elements(self) -> int:
        return self.in_features * self.out_features

    @property
    def is_head(self) -> bool:
        return not self.name.startswith("blocks.")


@dataclass(frozen=True)
class Gemm:
    """One product of [rows, depth] by [columns, depth], and the formats of its two operands."""

    role: str  # fprop | dgrad | wgrad
    rows: int
    columns: int
    depth: int
    formats: tuple[Format | None, Format | None]

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth


def linears_of(config: Config, recipe_name: str | None = None) -> tuple[Linear, ...]:
    """Every linear of the configured model, under its recipe or another one.

    Raises `ConfigError` where shapes and recipe do not fit.
    """
    recipe = build_recipe(config, recipe_name)
    try:
        with torch.device("meta"):
            model = build_model(config, torch.device("meta"))
        precision = apply_recipe(model, recipe, num_blocks=len(config.model.pattern), seed=0)
    except ValueError as error:
        raise ConfigError(f"model or precision: {error}") from error
    return tuple(
        Linear(name, layer.in_features, layer.out_features, layer.recipes["recipe"])
        for name, layer in precision.layers.items()
    )


Kinds = tuple[tuple[Linear, int], ...]


def kinds_of(linears: tuple[Linear, ...]) -> Kinds:
    """Linears alike but for their block, as one of them and their number."""
    alike: dict[tuple[object, ...], list[Linear]] = {}
    for linear in linears:
        key = (linear.in_features, linear.out_features, id(linear.recipe), linear.is_head)
        alike.setdefault(key, []).append(linear)
    return tuple((group[0], len(group)) for group in alike.values())


def gemms(linear: Linear, tokens: int, mode: str) -> Iterator[Gemm]:
    """A linear's three products for T tokens in a mode of the recipe."""
    recipe, t = in_mode(linear.recipe, mode), tokens
    n, k = linear.out_features, linear.in_features
    yield Gemm("fprop", t, n, k, (recipe.input.spec, recipe.weight.spec))
    yield Gemm("dgrad", t, k, n, (recipe.dgrad_gradient.spec, recipe.dgrad_weight.spec))
    yield Gemm("wgrad", n, k, t, (recipe.wgrad_gradient.spec, recipe.wgrad_input.spec))


@cache
def tensor_cores(gemm: Gemm, capability: tuple[int, int]) -> str:
    """`fp4`, `fp8` or `bf16`: what multiplies there. Emulated formats multiply as BF16."""
    names = (format_name(gemm.formats[0]), format_name(gemm.formats[1]))
    problem = Problem(names, gemm.rows, gemm.columns, (gemm.depth, gemm.depth))
    if choose(Device("cuda", capability), problem).backend != "blackwell":
        return "bf16"
    return f"fp{ELEMENT_BITS[names[0]]}"


def named_precision(gemm: Gemm) -> str:
    """What the recipe makes of a product, whatever runs it: the wider of its operands."""
    bits = max(format.element_bits if format else 16 for format in gemm.formats)
    return {4: "fp4", 8: "fp8", 16: "bf16"}[bits]
