"""The model's frame: configuration, names, precision, checkpointing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model import HybridModel, ModelConfig, document_index
from model.linear import Linear

Build = Callable[..., ModelConfig]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pattern": "M-X"}, "pattern"),
        ({"pattern": ""}, "pattern"),
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
        ({"mamba_num_groups": 3}, "mamba_num_groups=3"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"vocab_size": 10.5}, "vocab_size=10.5"),
        ({"mamba_conv_kernel": 1}, "mamba_conv_kernel=1"),
        ({"rope_theta": 1e4, "attention_head_dim": 15}, "rope_theta"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"dt_init_min": 1.0}, "dt_init_min"),
        ({"dt_floor": -1.0}, "dt_floor"),
    ],
)
def test_an_impossible_shape_is_refused_by_name(
    small_config: Build, changes: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        small_config(**changes)


def test_config_survives_a_dictionary_and_refuses_unknown_fields(small_config: Build) -> None:
    config = small_config(rope_theta=1e4)
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="num_experts"):
        ModelConfig.from_dict(config.to_dict() | {"num_experts": 4})


def test_linears_have_the_names_that_recipes_match(small_config: Build) -> None:
    model = HybridModel(small_config(pattern="M-*"))
    names = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    assert names == [
        "blocks.0.mamba.in_zxbc",
        "blocks.0.mamba.in_dt",
        "blocks.0.mamba.out",
        "blocks.1.ffn.up",
        "blocks.1.ffn.down",
        "blocks.2.attention.qkv",
        "blocks.2.attention.o",
        "head",
    ]
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2}
    assert matrices == {f"{n}.weight" for n in names} | {
        "embedding.weight",
        "blocks.0.mamba.conv.weight",
    }


def test_swapped_leaves_are_used_everywhere(small_config: Build) -> None:
    """Each product with a weight goes through its module, in loss, logits and generation."""
    model = HybridModel(small_config(pattern="M-*"))
    calls: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(
                lambda *_, name=name: calls.__setitem__(name, calls.get(name, 0) + 1)
            )
    tokens = torch.ones(1, 4, dtype=torch.int64)
    seq_idx = torch.zeros(1, 4, dtype=torch.int32)
    model.loss(tokens, tokens, seq_idx)
    model.logits(tokens, seq_idx)
    _, state = model.prefill(tokens, seq_idx, 1)
    model.step(tokens[:, 0], state)
    assert len(calls) == 8
    assert set(calls.values()) == {4}


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_gives_the_same_bits(small_config: Build, checkpointing: str) -> None:
    config = small_config()
    tokens = torch.randint(0, 101, (3, 21))
    seq_idx = document_index(tokens, 5)
    gradients = []
    for mode in ("none", checkpointing):
        model = HybridModel(config, activation_checkpointing=mode)  # type: ignore[arg-type]
        loss, _ = model.loss(tokens, tokens, seq_idx)
        loss.backward()
        gradients.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_unknown_checkpointing_is_refused(small_config: Build) -> None:
    with pytest.raises(ValueError, match="activation_checkpointing='some'"):
        HybridModel(small_config(), activation_checkpointing="some")  # type: ignore[arg-type]


def test_bf16_activations_keep_fp32_parameters_and_gradients(small_config: Build) -> None:
    config = small_config()
    wide = HybridModel(config)
    narrow = HybridModel(config, compute_dtype=torch.bfloat16)
    tokens = torch.randint(0, 101, (2, 16))
    seq_idx = document_index(tokens, 5)
    hidden = narrow.hidden(tokens, seq_idx)
    assert hidden.dtype == torch.bfloat16
    loss, count = narrow.loss(tokens, tokens, seq_idx)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in narrow.parameters())
    expected, _ = wide.loss(tokens, tokens, seq_idx)
    assert abs(loss - expected) / count < 0.02


def test_rotary_positions_are_relative(small_config: Build) -> None:
    model = HybridModel(small_config(pattern="*-", rope_theta=100.0))
    tokens = torch.randint(0, 101, (1, 10))
    shifted = torch.cat([torch.ones(1, 7, dtype=torch.int64), tokens], dim=1)
    seq_idx = torch.cat([torch.zeros(1, 7), torch.ones(1, 10)], dim=1).to(torch.int32)
    alone = model.logits(tokens, torch.zeros(1, 10, dtype=torch.int32))
    torch.testing.assert_close(model.logits(shifted, seq_idx)[:, 7:], alone, atol=1e-5, rtol=1e-5)
    without = HybridModel(small_config(pattern="*-"))
    assert not torch.allclose(without.logits(tokens, seq_idx[:, 7:]), alone, atol=1e-3)


def test_paths_names_each_kind_of_block(small_config: Build) -> None:
    paths = HybridModel(small_config()).paths()
    assert paths["mamba"] == "torch (on cpu)"
    assert set(paths) == {"mamba", "attention", "ffn"}


def test_tied_embeddings_share_storage_and_sum_gradients(small_config: Build) -> None:
    model = HybridModel(small_config(tie_embeddings=True))
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
