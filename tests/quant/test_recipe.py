"""The recipes are the paper's table, and each variant turns one switch of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quant.recipe import (
    LINEAR_RECIPES,
    RECIPES,
    ROLES,
    LinearRecipe,
    Operand,
    Recipe,
    named_recipe,
    recipe_from_dict,
)

PAPER = RECIPES["nvfp4_paper"]


def test_nvfp4_is_the_papers_table() -> None:
    recipe = PAPER.default
    assert recipe.input == Operand("nvfp4")
    assert recipe.weight == recipe.dgrad_weight == Operand("nvfp4_2d")
    assert recipe.dgrad_gradient == Operand("nvfp4", "stochastic")
    assert recipe.wgrad_gradient == Operand("nvfp4", "stochastic", rht=16)
    assert recipe.wgrad_input == Operand("nvfp4", rht=16)


def test_mxfp4_rotates_tiles_of_32_and_fp8_uses_square_weight_blocks() -> None:
    mxfp4, fp8 = RECIPES["mxfp4"].default, RECIPES["fp8_block"].default
    assert mxfp4.wgrad_gradient == Operand("mxfp4", "stochastic", rht=32)
    assert mxfp4.wgrad_input == Operand("mxfp4", rht=32)
    assert fp8.weight == fp8.dgrad_weight == Operand("fp8_block_2d")
    assert {fp8.operand(r).rounding for r in ROLES} == {"nearest"}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("no_rht", {"wgrad_gradient": {"rht"}, "wgrad_input": {"rht"}}),
        ("no_sr", {"dgrad_gradient": {"rounding"}, "wgrad_gradient": {"rounding"}}),
        ("no_2d", {"weight": {"format"}, "dgrad_weight": {"format"}}),
        ("guard_16_17", {"dgrad_gradient": {"guard"}, "wgrad_gradient": {"guard"}}),
    ],
)
def test_a_leave_one_out_recipe_turns_one_switch(name: str, changed: dict[str, set[str]]) -> None:
    variant = RECIPES[name]
    assert replace(variant, name=PAPER.name, default=PAPER.default) == PAPER
    found: dict[str, set[str]] = {}
    for role in ROLES:
        new, old = variant.default.operand(role), PAPER.default.operand(role)
        fields = {f for f in Operand.__dataclass_fields__ if getattr(new, f) != getattr(old, f)}
        if fields:
            found[role] = fields
    assert found == changed


def test_all_layers_differs_in_block_positions_alone_and_keeps_them() -> None:
    variant = RECIPES["all_layers"]
    expected = replace(PAPER, name="all_layers", first=0, last=0, fixed_blocks=True)
    assert variant == expected
    assert variant.with_blocks(2, 8) == variant
    assert (PAPER.with_blocks(2, 8).first, PAPER.with_blocks(2, 8).last) == (2, 8)


@pytest.mark.parametrize("name", [*RECIPES])
def test_a_recipe_survives_json(name: str) -> None:
    recipe = RECIPES[name]
    back = recipe_from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert back == recipe
    assert back.fingerprint(4) == recipe.fingerprint(4)


def test_a_recipe_may_be_written_by_names_and_changes_alone() -> None:
    written = {
        "name": "mine",
        "default": {"input": {"format": "mxfp8"}},
        "rules": [["*.attention.*", "nvfp4"]],
    }
    recipe = recipe_from_dict(written)
    assert recipe.default == LinearRecipe(input=Operand("mxfp8"))
    assert recipe.rules == (("*.attention.*", LINEAR_RECIPES["nvfp4"]),)
    assert (recipe.first, recipe.last) == (1, 1)


def test_the_fingerprint_follows_the_numerics_and_nothing_else() -> None:
    renamed = replace(PAPER, name="another name")
    assert renamed.fingerprint(4) == PAPER.fingerprint(4)
    prints = {PAPER.fingerprint(), PAPER.fingerprint(4), PAPER.fingerprint(8)}
    prints |= {PAPER.with_blocks(2, 8).fingerprint(4)}
    prints |= {r.fingerprint(4) for n, r in RECIPES.items() if n != PAPER.name}
    assert len(prints) == 4 + len(RECIPES) - 1


def test_names_and_the_alias_resolve() -> None:
    assert named_recipe("fp8") is named_recipe("fp8_block")
    with pytest.raises(ValueError, match=r"unknown recipe 'nvfp5'.*'nvfp4_paper'"):
        named_recipe("nvfp5")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Operand("nvfp5"), "unknown format 'nvfp5'"),
        (lambda: Operand("nvfp4", "up"), "unknown rounding 'up'"),  # type: ignore[arg-type]
        (lambda: Operand("nvfp4", rht=8), "RHT of size 8"),
        (lambda: Operand(rounding="stochastic"), "a BF16 operand takes no rounding"),
        (lambda: Operand("mxfp8", "stochastic"), "stochastic rounding exists for E2M1 only"),
        (lambda: Operand("nvfp4", guard=True), "guard belongs to stochastic rounding"),
        (lambda: LinearRecipe(input=Operand("nvfp4", rht=16)), "RHT belongs to the two Wgrad"),
        (lambda: LinearRecipe(wgrad_input=Operand("nvfp4", rht=16)), "RHT cancels only if both"),
        (lambda: LinearRecipe(weight=Operand("nvfp4", "stochastic")), "rounded to nearest"),
        (lambda: LinearRecipe(input=Operand("nvfp4_2d")), "square blocks are for weights"),
        (lambda: Recipe("r", LINEAR_RECIPES["nvfp4"], first=1.5), "fraction of the blocks"),
        (lambda: recipe_from_dict({"name": "r"}), r"lacks \['default'\]"),
        (lambda: recipe_from_dict({"name": "r", "default": "fp4"}), "unknown linear recipe 'fp4'"),
        (lambda: recipe_from_dict({"name": "r", "default": {"x": {}}}), r"LinearRecipe has no"),
        (
            lambda: recipe_from_dict({"name": "r", "default": {"input": {"bits": 4}}}),
            r"Operand has no \['bits'\]",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_cause(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
