"""Small configurations that the model's tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model import ModelConfig


def build_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "pattern": "M-M*-",
        "vocab_size": 101,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "attention_head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "mamba_state_size": 10,
        "mamba_num_groups": 2,
        "mamba_chunk_size": 8,
    }
    return ModelConfig(**(values | changes))


@pytest.fixture
def small_config() -> Callable[..., ModelConfig]:
    """All three blocks, an odd vocabulary, 2 groups; a test changes what it is about."""
    return build_config


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
