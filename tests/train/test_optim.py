"""Every parameter is in exactly one group, and only matrices of linears and the embedding decay."""

from __future__ import annotations

import dataclasses

import torch

from model import HybridModel, ModelConfig
from pipeline.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from tests.train.test_schedule import train_config

SHAPE = ModelConfig(
    pattern="M*-",
    vocab_size=32,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=2,
    num_kv_heads=1,
    attention_head_dim=16,
    mamba_num_heads=4,
    mamba_head_dim=16,
    mamba_state_size=16,
    mamba_num_groups=2,
    mamba_chunk_size=8,
)


def grouped(model: HybridModel) -> dict[str, list[float]]:
    """The weight decay of every group that a parameter stands in, by parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays: dict[str, list[float]] = {name: [] for name in names.values()}
    for group in build_optimizer(model, train_config()).param_groups:
        for parameter in group["params"]:
            decays[names[id(parameter)]].append(group["weight_decay"])
    return decays


def test_every_parameter_stands_in_exactly_one_group() -> None:
    assert all(len(decays) == 1 for decays in grouped(HybridModel(SHAPE)).values())


def test_norms_biases_and_mamba_s_vectors_do_not_decay() -> None:
    for name, (decay,) in grouped(HybridModel(SHAPE)).items():
        vector = any(word in name for word in ("norm", "A_log", "dt_bias", "bias", "conv"))
        vector = vector or name.endswith(".D")
        assert decay == (0.0 if vector else 0.1), name


def test_tied_weights_stand_in_one_group_once() -> None:
    model = HybridModel(dataclasses.replace(SHAPE, tie_embeddings=True))
    assert all(len(decays) == 1 for decays in grouped(model).values())


def test_the_optimizer_s_state_survives_by_name() -> None:
    def trained_step(model: HybridModel, optimizer: torch.optim.Optimizer) -> None:
        tokens = torch.arange(16).view(2, 8)
        documents = torch.zeros(2, 8, dtype=torch.int32)
        loss, _ = model.loss(tokens, tokens.roll(-1, 1), documents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model = HybridModel(SHAPE)
    optimizer = build_optimizer(model, train_config())
    trained_step(model, optimizer)
    copy = HybridModel(SHAPE, seed=9)
    copy.load_state_dict(model.state_dict())
    restored = build_optimizer(copy, train_config())
    saved = {k: v.clone() for k, v in optimizer_tensors(model, optimizer).items()}
    load_optimizer_tensors(copy, restored, saved)
    trained_step(model, optimizer)
    trained_step(copy, restored)
    for mine, other in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(mine, other)
