"""The model is transformers' NemotronH under other names: state dict, logits, loss, gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from model import HybridModel, ModelConfig
from model.hf import (
    config_from_nemotron_h,
    config_to_nemotron_h,
    from_nemotron_h,
    linear_rows,
    to_nemotron_h,
)
from tests.model.peer import assert_same_computation, randomized

transformers = pytest.importorskip("transformers")


def reference(model: HybridModel) -> torch.nn.Module:
    """Transformers' model with the same weights."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    settings = config_to_nemotron_h(model.config)
    theirs = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**settings))
    theirs.load_state_dict(to_nemotron_h(model.state_dict(), model.config), strict=True)
    return theirs


ConfigFactory = Callable[..., ModelConfig]

CASES = [
    {},
    {"mamba_num_groups": 8},
    {"tie_embeddings": True},
    {"vocab_size": 77, "mamba_num_groups": 8, "num_kv_heads": 4, "mamba_conv_kernel": 3},
    {"mamba_num_groups": 1, "pattern": "MMM", "mamba_chunk_size": 64, "dt_floor": 0.05},
]


@pytest.mark.parametrize("changes", CASES)
def test_logits_loss_and_gradients_equal_transformers(
    small_config: ConfigFactory, changes: dict
) -> None:
    model = randomized(small_config(**changes))
    assert_same_computation(model, reference(model))


@pytest.mark.parametrize("changes", CASES)
def test_state_dict_maps_one_to_one_both_ways(small_config: ConfigFactory, changes: dict) -> None:
    model = randomized(small_config(**changes))
    theirs = reference(model).state_dict()
    mapped = to_nemotron_h(model.state_dict(), model.config)
    assert {n: t.shape for n, t in mapped.items()} == {n: t.shape for n, t in theirs.items()}
    back = from_nemotron_h(mapped, model.config)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("size", ["hybrid_12b", "hybrid_8b"])
def test_the_published_models_have_transformers_names_and_shapes(size: str) -> None:
    folder = Path(__file__).parents[2] / "conf" / "model"
    config = ModelConfig(**yaml.safe_load((folder / f"{size}.yaml").read_text()))
    with torch.device("meta"):
        model = HybridModel(config)
        settings = transformers.NemotronHConfig(**config_to_nemotron_h(config))
        theirs = transformers.NemotronHForCausalLM(settings).state_dict()
    mapped = to_nemotron_h(model.state_dict(), config)
    assert {n: t.shape for n, t in mapped.items()} == {n: t.shape for n, t in theirs.items()}
    back = from_nemotron_h(theirs, config)
    ours = model.state_dict()
    assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in ours.items()}


def test_linears_are_their_rows_of_ours(small_config: ConfigFactory) -> None:
    model = HybridModel(small_config())
    theirs = to_nemotron_h(model.state_dict(), model.config)
    for name, parts in linear_rows(model.config).items():
        rows = [model.get_parameter(f"{r.linear}.weight")[r.start : r.end] for r in parts]
        assert torch.equal(torch.cat(rows), theirs[f"{name}.weight"])
    of_parts = {rows.linear for parts in linear_rows(model.config).values() for rows in parts}
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert of_parts == linears


def test_a_missing_or_unknown_tensor_is_refused_by_name(small_config: ConfigFactory) -> None:
    model = HybridModel(small_config())
    state = model.state_dict()
    with pytest.raises(ValueError, match=r"blocks\.1\.ffn\.up\.weight"):
        to_nemotron_h(
            {n: t for n, t in state.items() if n != "blocks.1.ffn.up.weight"}, model.config
        )
    with pytest.raises(ValueError, match="surplus"):
        to_nemotron_h(state | {"surplus": torch.zeros(1)}, model.config)


def test_public_files_prefix_is_read(small_config: ConfigFactory) -> None:
    model = HybridModel(small_config())
    public = {
        name.replace("model.", "backbone."): tensor
        for name, tensor in to_nemotron_h(model.state_dict(), model.config).items()
    }
    assert from_nemotron_h(public, model.config).keys() == model.state_dict().keys()


def test_config_round_trip_through_transformers(small_config: ConfigFactory) -> None:
    config = small_config(tie_embeddings=True, norm_eps=1e-6)
    theirs = transformers.NemotronHConfig(**config_to_nemotron_h(config, eos_token_id=7))
    assert theirs.eos_token_id == 7
    assert config_from_nemotron_h(theirs.to_dict()) == config


def test_config_reads_either_pattern_and_refuses_a_contradiction(
    small_config: ConfigFactory,
) -> None:
    values = config_to_nemotron_h(small_config())
    only_types = {k: v for k, v in values.items() if k != "hybrid_override_pattern"}
    only_pattern = {k: v for k, v in values.items() if k != "layers_block_type"}
    legacy = only_types | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]}
    for variant in (only_types, only_pattern, legacy):
        assert config_from_nemotron_h(variant) == small_config()
    with pytest.raises(ValueError, match="contradicts"):
        config_from_nemotron_h(values | {"hybrid_override_pattern": "MMMMM"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hybrid_override_pattern": "MEM*-", "layers_block_type": None}, "E"),
        ({"layers_block_type": ["moe"], "hybrid_override_pattern": None}, "moe"),
        ({"ssm_state_size": None}, "ssm_state_size"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_conv_bias": False}, "use_conv_bias"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"num_hidden_layers": 4}, "num_hidden_layers"),
        ({"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon"),
    ],
)
def test_what_the_architecture_lacks_is_refused_by_name(
    small_config: ConfigFactory, changes: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        config_from_nemotron_h(config_to_nemotron_h(small_config()) | changes)


def test_rotary_positions_cannot_be_exported(small_config: ConfigFactory) -> None:
    with pytest.raises(ValueError, match="rope_theta"):
        config_to_nemotron_h(small_config(rope_theta=10000.0))
