"""A recipe swaps linears by name and position, and changes nothing else of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from quant import RECIPES, Precision, QuantLinear, apply_recipe, named_recipe
from quant.policy import bf16_blocks
from quant.recipe import LinearRecipe, Operand
from tests.quant.toy_hybrid import ToyHybrid, batch, linear


def apply(recipe: str, model: nn.Module, first: int = 0, last: int = 0) -> Precision:
    chosen = named_recipe(recipe).with_blocks(first, last)
    return apply_recipe(model, chosen, num_blocks=ToyHybrid.num_blocks, seed=7)


def test_every_linear_is_swapped_around_the_same_parameter() -> None:
    model, untouched = ToyHybrid(), ToyHybrid()
    parameters = dict(model.named_parameters())
    precision = apply("nvfp4", model)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.state_dict().keys() == untouched.state_dict().keys()
    linears = [n for n, m in untouched.named_modules() if isinstance(m, nn.Linear)]
    assert [*precision.layers] == linears
    assert all(isinstance(model.get_submodule(name), QuantLinear) for name in linears)


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_dt_and_the_head_are_bf16_in_every_recipe(recipe: str) -> None:
    rows = {row.name: row for row in apply(recipe, ToyHybrid()).table()}
    for name in ("head", "blocks.0.mamba.in_dt"):
        assert {rows[name].fprop, rows[name].dgrad, rows[name].wgrad} == {"bf16 x bf16"}
    quantized = rows["blocks.1.ffn.up"].fprop != "bf16 x bf16"
    assert quantized == (recipe != "bf16")


def test_the_production_recipe_spares_attention_and_gives_mamba_out_8_bits() -> None:
    rows = {row.name: row for row in apply("nvfp4", ToyHybrid()).table()}
    assert rows["blocks.2.attention.qkv"].fprop == "bf16 x bf16"
    assert rows["blocks.2.attention.o"].wgrad == "bf16 x bf16"
    assert rows["blocks.0.mamba.out"].wgrad == "mxfp8 x mxfp8"
    assert rows["blocks.0.mamba.in_zxbc"].fprop == "nvfp4 x nvfp4_2d"
    assert rows["blocks.1.ffn.down"].dgrad == "nvfp4+sr x nvfp4_2d"
    assert rows["blocks.1.ffn.down"].wgrad == "nvfp4+rht16+sr x nvfp4+rht16"
    paper = {row.name: row for row in apply("nvfp4_paper", ToyHybrid()).table()}
    assert paper["blocks.2.attention.qkv"].fprop == "nvfp4 x nvfp4_2d"
    assert paper["blocks.0.mamba.out"].fprop == "nvfp4 x nvfp4_2d"


def test_first_and_last_blocks_stay_bf16() -> None:
    precision = apply("nvfp4_paper", ToyHybrid(), first=1, last=2)
    quantized = {r.name.split(".")[1] for r in precision.table() if r.fprop != "bf16 x bf16"}
    assert quantized == {"1"}


@pytest.mark.parametrize(
    ("first", "last", "blocks", "expected"),
    [
        (2, 8, 62, (2, 8)),
        (0.0, 0.15, 52, (0, 8)),
        (0.1, 0.1, 30, (3, 3)),
        (0, 0.25, 62, (0, 16)),
    ],
)
def test_a_fraction_of_the_blocks_is_rounded_up(
    first: float, last: float, blocks: int, expected: tuple[int, int]
) -> None:
    assert bf16_blocks(named_recipe("nvfp4").with_blocks(first, last), blocks) == expected


def test_the_index_of_a_layer_does_not_depend_on_the_policy() -> None:
    handles = [apply(r, ToyHybrid(), 1, 1) for r in ("bf16", "nvfp4", "all_layers", "mxfp8")]
    indices = [{n: layer.index for n, layer in p.layers.items()} for p in handles]
    assert all(i == indices[0] for i in indices)
    assert [*indices[0].values()] == [*range(len(indices[0]))]


def test_the_table_follows_the_mode_and_prints() -> None:
    precision = apply("nvfp4_paper", ToyHybrid())
    name = "blocks.1.ffn.up"
    row = {r.name: r for r in precision.table()}[name]
    with precision.override("bf16_forward"):
        forward = {r.name: r for r in precision.table()}[name]
        with precision.override("bf16"):
            assert {r.dgrad for r in precision.table()} == {"bf16 x bf16"}
    assert precision.mode == "recipe"
    assert (forward.fprop, forward.dgrad, forward.wgrad) == ("bf16 x bf16", row.dgrad, row.wgrad)
    assert row.backend == "emulated"
    lines = str(precision).splitlines()
    assert len(lines) == 1 + len(precision.layers)
    assert "nvfp4+rht16+sr x nvfp4+rht16" in lines[1 + [*precision.layers].index(name)]


def test_an_error_inside_an_override_restores_the_mode() -> None:
    precision = apply("nvfp4", ToyHybrid())
    with pytest.raises(KeyError), precision.override("bf16"):
        raise KeyError
    assert precision.mode == "recipe"


def test_rules_are_tried_in_order() -> None:
    only_input = LinearRecipe(input=Operand("mxfp8"))
    recipe = replace(
        named_recipe("nvfp4").with_blocks(0, 0),
        rules=(
            ("*.in_dt", "bf16"),
            ("*.ffn.up", only_input),
            ("*.ffn.*", "bf16"),
            ("*.attention.*", "mxfp4"),
        ),
    )
    precision = apply_recipe(ToyHybrid(), recipe, num_blocks=4, seed=0)
    fprop = {r.name: r.fprop for r in precision.table()}
    assert fprop["blocks.1.ffn.up"] == "mxfp8 x bf16"
    assert fprop["blocks.1.ffn.down"] == "bf16 x bf16"
    assert fprop["blocks.2.attention.o"] == "mxfp4 x mxfp4"
    assert fprop["head"] == "bf16 x bf16"


def with_bias() -> nn.Module:
    model = ToyHybrid()
    model.blocks[1].ffn.up = nn.Linear(64, 128)
    return model


def with_odd_width() -> nn.Module:
    model = ToyHybrid()
    model.blocks[1].ffn.up = linear(64, 120)
    return model


@pytest.mark.parametrize(
    ("model", "recipe", "blocks", "message"),
    [
        (with_bias, "bf16", 4, r"blocks\.1\.ffn\.up has a bias.*use bias=False"),
        (
            with_odd_width,
            "nvfp4_paper",
            4,
            r"blocks\.1\.ffn\.up \(120 x 64\).*out_features.*multiple of 16, not 120.*by a rule",
        ),
        (with_odd_width, "mxfp8", 4, "multiple of 32"),
        (ToyHybrid, "nvfp4", 3, r"blocks\.3\.ffn\.up lies outside num_blocks=3"),
        (lambda: linear(64, 64), "nvfp4", 4, "cannot be swapped in place"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_anything_is_swapped(
    model, recipe: str, blocks: int, message: str
) -> None:
    built = model()
    with pytest.raises(ValueError, match=message):
        apply_recipe(built, named_recipe(recipe).with_blocks(0, 0), num_blocks=blocks, seed=0)
    assert not any(isinstance(m, QuantLinear) for m in built.modules())


def test_a_recipe_that_would_quantize_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantizes nothing: its first 2 and last 2"):
        apply("nvfp4", ToyHybrid(), 2, 2)
    apply("bf16", ToyHybrid(), 2, 2)


def test_a_second_recipe_an_unknown_mode_and_an_unknown_backend_are_refused() -> None:
    model = ToyHybrid()
    precision = apply("nvfp4", model)
    with pytest.raises(ValueError, match="a recipe is applied already"):
        apply("nvfp4", model)
    with pytest.raises(ValueError, match=r"unknown precision mode 'fp8'.*bf16_forward"):
        precision.mode = "fp8"
    with pytest.raises(ValueError, match="unknown backend 'tpu'"):
        apply_recipe(ToyHybrid(), named_recipe("bf16"), num_blocks=4, seed=0, backend="tpu")


def test_fp8_with_free_scales_is_refused_as_no_backend_is_exact() -> None:
    recipe = replace(
        named_recipe("fp8_block").with_blocks(0, 0),
        default=LinearRecipe(input=Operand("fp8_block_free")),
    )
    with pytest.raises(ValueError, match="no backend multiplies fp8_block_free exactly"):
        apply_recipe(ToyHybrid(), recipe, num_blocks=4, seed=0)


def test_a_model_keeps_its_training_flag_and_its_dtype() -> None:
    model = ToyHybrid().eval().bfloat16()
    precision = apply("nvfp4", model)
    assert not any(layer.training for layer in precision.layers.values())
    with torch.no_grad():
        assert model(batch().bfloat16()).dtype == torch.bfloat16
