"""Parameter and FLOP formulas against the model itself and the published sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import HybridModel, ModelConfig, count_parameters, flops_per_token

Build = Callable[..., ModelConfig]
PATTERN_12B = "M-M-M-M*-" * 6 + "M-M-M-M-"
PATTERN_8B = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"


def published(pattern: str, hidden: int, ffn: int, heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(pattern, 131072, hidden, ffn, heads, 8, 128, 128, head_dim, 128, 8)


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (published(PATTERN_12B, 5120, 20480, 40, 80), 12_310_001_152),
        (published(PATTERN_8B, 4096, 21504, 32, 64), 8_100_852_736),
    ],
    ids=["12B", "8B"],
)
def test_published_hybrids_have_the_published_size(config: ModelConfig, total: int) -> None:
    assert count_parameters(config)["total"] == total
    with torch.device("meta"):
        model = HybridModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == total


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"pattern": "*-*-"}])
def test_parameter_formula_counts_each_kind(small_config: Build, changes: dict) -> None:
    config = small_config(**changes)
    counts = count_parameters(config)
    actual = dict.fromkeys(counts, 0)
    for name, parameter in HybridModel(config).named_parameters():
        kinds = ("embedding", "mamba", "ffn", "attention", "head")
        kind = next((k for k in kinds if f"{k}." in name), "norms")
        actual[kind] += parameter.numel()
        actual["total"] += parameter.numel()
    assert counts == actual


@pytest.mark.parametrize("pattern", ["-", "*", "M", "M-M*-"])
def test_flop_formula_equals_the_counter(small_config: Build, pattern: str) -> None:
    config = small_config(pattern=pattern)
    model, batch, length = HybridModel(config), 2, 64
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with (
        counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model.logits(tokens, torch.zeros(batch, length, dtype=torch.int32))
    counted = counter.get_total_flops() / (batch * length)
    formula = flops_per_token(config, length)
    # The counter also sees the scan's sums of log-decays and its combination of states.
    overhead = counted / formula["total"] - 1
    assert 0 <= overhead < (0.1 if "M" in pattern else 1e-9)
    assert formula["total"] == sum(v for k, v in formula.items() if k != "total")


def test_linear_flops_are_twice_the_weights_that_multiply(small_config: Build) -> None:
    config = small_config()
    flops, counts = flops_per_token(config, 128), count_parameters(config)
    linear = sum(value for kind, value in flops.items() if kind.endswith("_linear"))
    matrices = [
        p.numel()
        for n, p in HybridModel(config).named_parameters()
        if p.dim() == 2 and not n.endswith(("embedding.weight", "conv.weight"))
    ]
    assert linear == 2 * sum(matrices)
    assert flops["head_linear"] == 2 * counts["head"]
