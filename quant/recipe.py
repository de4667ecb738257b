"""The recipe as data: which operand of which GEMM gets which format, rounding and transform.

A linear runs three GEMMs; a `LinearRecipe` names both operands of each:

    GEMM                 left operand       right operand     reduces over
    Fprop  y  = x W^T    `input`            `weight`          K, input features
    Dgrad  dx = dy W     `dgrad_gradient`   `dgrad_weight`    N, output features
    Wgrad  dW = dy^T x   `wgrad_gradient`   `wgrad_input`     T, tokens

The blocks of every operand lie along the dimension that its GEMM reduces over. With a square block
format `weight` and `dgrad_weight` are one quantization and its transpose; with a 1-D format they
are two, of different values.

The tables follow "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149, section 4).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from quant.formats import FORMATS, Format
from quant.quantize import Rounding

ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
RHT_SIZES = (0, 16, 32)


@dataclass(frozen=True)
class Operand:
    """How one operand of one GEMM is made.

    format: a name in `quant.formats.FORMATS`, or None for BF16.
    rounding: "nearest" (ties to even) or "stochastic".
    rht: size of the random Hadamard transform along the reduced dimension; 0 for none.
    guard: keep the scaled block maximum under 6 (factor 16/17), so that stochastic rounding stays
        unbiased.
    """

    format: str | None = None
    rounding: Rounding = "nearest"
    rht: int = 0
    guard: bool = False

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f"unknown format {self.format!r}: choose from {sorted(FORMATS)}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {self.rounding!r}: choose from {ROUNDINGS}")
        if self.rht not in RHT_SIZES:
            raise ValueError(f"RHT of size {self.rht}: choose from {RHT_SIZES}")
        spec = self.spec
        if spec is None and (self.stochastic or self.rht or self.guard):
            raise ValueError("a BF16 operand takes no rounding, rht or guard: give it a format")
        if spec is not None and self.stochastic and spec.element != "e2m1":
            raise ValueError(f"stochastic rounding exists for E2M1 only, not for {self.format}")
        if spec is not None and self.guard and not (self.stochastic and spec.has_global_scale):
            raise ValueError(
                "guard belongs to stochastic rounding in NVFP4: set rounding, or drop it"
            )

    @property
    def spec(self) -> Format | None:
        """The block format itself; None for BF16."""
        return None if self.format is None else FORMATS[self.format]

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def __str__(self) -> str:
        if self.format is None:
            return "bf16"
        notes = [f"rht{self.rht}"] if self.rht else []
        notes += ["sr"] if self.stochastic else []
        notes += ["guard"] if self.guard else []
        return "+".join([self.format, *notes])


BF16 = Operand()


@dataclass(frozen=True)
class LinearRecipe:
    """The six operands of a linear's three GEMMs. All BF16 by default."""

    input: Operand = BF16
    weight: Operand = BF16
    dgrad_gradient: Operand = BF16
    dgrad_weight: Operand = BF16
    wgrad_gradient: Operand = BF16
    wgrad_input: Operand = BF16

    def __post_init__(self) -> None:
        for role in ("input", "weight", "dgrad_gradient", "dgrad_weight"):
            if self.operand(role).rht:
                raise ValueError(
                    f"{role}: the RHT belongs to the two Wgrad operands; set {role}.rht to 0"
                )
        for role in ("weight", "dgrad_weight"):
            if self.operand(role).stochastic or self.operand(role).guard:
                raise ValueError(f"{role}: weights are rounded to nearest, without guard")
        if self.wgrad_gradient.rht != self.wgrad_input.rht:
            raise ValueError(
                f"the RHT cancels only if both Wgrad operands have it: wgrad_gradient.rht is "
                f"{self.wgrad_gradient.rht}, wgrad_input.rht is {self.wgrad_input.rht}"
            )
        for role in ("input", "dgrad_gradient", "wgrad_gradient", "wgrad_input"):
            spec = self.operand(role).spec
            if spec is not None and spec.block[0] != 1:
                raise ValueError(f"{role}: square blocks are for weights; choose a 1-D format")

    def operand(self, role: str) -> Operand:
        operand = getattr(self, role)
        assert isinstance(operand, Operand)
        return operand

    @property
    def quantized(self) -> bool:
        return any(self.operand(role).format for role in ROLES)

    @property
    def fprop(self) -> str:
        return f"{self.input} x {self.weight}"

    @property
    def dgrad(self) -> str:
        return f"{self.dgrad_gradient} x {self.dgrad_weight}"

    @property
    def wgrad(self) -> str:
        return f"{self.wgrad_gradient} x {self.wgrad_input}"


ROLES = tuple(field.name for field in fields(LinearRecipe))


def _uniform(one_d: str, weight: str, gradient: Rounding = "nearest", rht: int = 0) -> LinearRecipe:
    """One format family throughout; `gradient` rounding for dy, `rht` on Wgrad."""
    return LinearRecipe(
        input=Operand(one_d),
        weight=Operand(weight),
        dgrad_gradient=Operand(one_d, gradient),
        dgrad_weight=Operand(weight),
        wgrad_gradient=Operand(one_d, gradient, rht),
        wgrad_input=Operand(one_d, rht=rht),
    )


LINEAR_RECIPES: Mapping[str, LinearRecipe] = {
    "bf16": LinearRecipe(),
    "fp8_block": _uniform("fp8_block", "fp8_block_2d"),
    "mxfp8": _uniform("mxfp8", "mxfp8"),
    "mxfp4": _uniform("mxfp4", "mxfp4", "stochastic", rht=32),
    "nvfp4": _uniform("nvfp4", "nvfp4_2d", "stochastic", rht=16),
}


@dataclass(frozen=True)
class Recipe:
    """Precision of a whole model: by name, by block position.

    default: what a linear inside a block gets. One outside the blocks (the head) is always BF16.
    rules: (name pattern, LinearRecipe or a name in LINEAR_RECIPES); the first match wins. Patterns
        are shell-style and match the whole name: "*.mamba.out".
    first, last: blocks at either end that stay BF16: a count, or a fraction of all (rounded up).
    fixed_blocks: `first` and `last` are what the recipe is about; `with_blocks` leaves them alone.
    """

    name: str
    default: LinearRecipe
    rules: tuple[tuple[str, LinearRecipe], ...] = ()
    first: int | float = 1
    last: int | float = 1
    fixed_blocks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "default", _linear_recipe(self.default))
        rules = tuple((pattern, _linear_recipe(value)) for pattern, value in self.rules)
        object.__setattr__(self, "rules", rules)
        for end in (self.first, self.last):
            if end < 0 or (isinstance(end, float) and end >= 1):
                raise ValueError(
                    f"BF16 blocks first={self.first}, last={self.last}: give a count (int) "
                    f"or a fraction of the blocks (float under 1)"
                )

    def with_blocks(self, first: int | float, last: int | float) -> Recipe:
        """The same recipe for a model that keeps other blocks in BF16."""
        return self if self.fixed_blocks else replace(self, first=first, last=last)

    def fingerprint(self, micro_batch_size: int | None = None) -> str:
        """sha256 of all that decides the numerics; the name is a label and stays out.

        micro_batch_size: sequences in a micro-batch. It belongs to the numerics, since a tensor's
            amax and the RHT's tiles span a micro-batch; None where only the recipe is meant.
        """
        content = self.to_dict() | {"name": None, "micro_batch_size": micro_batch_size}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `recipe_from_dict` reads it back to an equal recipe."""
        plain = asdict(self)
        plain["rules"] = [[pattern, asdict(value)] for pattern, value in self.rules]
        return plain


def _linear_recipe(value: LinearRecipe | str | Mapping[str, Any]) -> LinearRecipe:
    """A LinearRecipe from itself, from its name, or from a mapping of operands."""
    if isinstance(value, LinearRecipe):
        return value
    if isinstance(value, str):
        if value not in LINEAR_RECIPES:
            raise ValueError(
                f"unknown linear recipe {value!r}: choose from {sorted(LINEAR_RECIPES)}"
            )
        return LINEAR_RECIPES[value]
    _check_keys(value, LinearRecipe)
    for operand in value.values():
        _check_keys(operand, Operand)
    return LinearRecipe(**{role: Operand(**operand) for role, operand in value.items()})


def _check_keys(value: Mapping[str, Any], kind: type) -> None:
    known = {field.name for field in fields(kind)}
    unknown = set(value) - known
    if unknown:
        raise ValueError(f"{kind.__name__} has no {sorted(unknown)}: choose from {sorted(known)}")


def recipe_from_dict(value: Mapping[str, Any]) -> Recipe:
    """Read a recipe from plain types, as `Recipe.to_dict` or a YAML file gives it.

    Left-out keys take their defaults; a linear recipe may be given by its name. Raises ValueError
    that names an unknown key, format or linear recipe.
    """
    _check_keys(value, Recipe)
    missing = {"name", "default"} - set(value)
    if missing:
        raise ValueError(f"the recipe lacks {sorted(missing)}")
    rules = tuple((pattern, _linear_recipe(rule)) for pattern, rule in value.get("rules", ()))
    return Recipe(**{**value, "default": _linear_recipe(value["default"]), "rules": rules})


# dt feeds an exponential and is a sliver of the compute: BF16 in every recipe.
ALWAYS_BF16 = (("*.mamba.in_dt", LINEAR_RECIPES["bf16"]),)

_NVFP4 = LINEAR_RECIPES["nvfp4"]
_PAPER = Recipe("nvfp4_paper", _NVFP4, ALWAYS_BF16)


def _leave_out(name: str, **operands: Operand) -> Recipe:
    return replace(_PAPER, name=name, default=replace(_NVFP4, **operands))


# The later production hybrids (Nemotron 3): attention's projections in BF16, Mamba's out_proj in
# MXFP8.
_PRODUCTION_RULES = (
    *ALWAYS_BF16,
    ("*.attention.qkv", LINEAR_RECIPES["bf16"]),
    ("*.attention.o", LINEAR_RECIPES["bf16"]),
    ("*.mamba.out", LINEAR_RECIPES["mxfp8"]),
)

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", LINEAR_RECIPES["bf16"], ALWAYS_BF16),
        Recipe("fp8_block", LINEAR_RECIPES["fp8_block"], ALWAYS_BF16),
        Recipe("mxfp8", LINEAR_RECIPES["mxfp8"], ALWAYS_BF16),
        Recipe("mxfp4", LINEAR_RECIPES["mxfp4"], ALWAYS_BF16),
        _PAPER,
        Recipe("nvfp4", _NVFP4, _PRODUCTION_RULES),
        _leave_out(
            "no_rht",
            wgrad_gradient=replace(_NVFP4.wgrad_gradient, rht=0),
            wgrad_input=replace(_NVFP4.wgrad_input, rht=0),
        ),
        _leave_out(
            "no_sr",
            dgrad_gradient=replace(_NVFP4.dgrad_gradient, rounding="nearest"),
            wgrad_gradient=replace(_NVFP4.wgrad_gradient, rounding="nearest"),
        ),
        _leave_out("no_2d", weight=Operand("nvfp4"), dgrad_weight=Operand("nvfp4")),
        replace(_PAPER, name="all_layers", first=0, last=0, fixed_blocks=True),
        _leave_out(
            "guard_16_17",
            dgrad_gradient=replace(_NVFP4.dgrad_gradient, guard=True),
            wgrad_gradient=replace(_NVFP4.wgrad_gradient, guard=True),
        ),
    )
}
ALIASES: Mapping[str, str] = {"fp8": "fp8_block"}


def named_recipe(name: str) -> Recipe:
    """A recipe by name or alias; ValueError lists the names."""
    name = ALIASES.get(name, name)
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: choose from {sorted({*RECIPES, *ALIASES})}")
    return RECIPES[name]
