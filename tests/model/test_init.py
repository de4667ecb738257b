"""Initial values: the table, its depth scaling, and independence of order and device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from model import HybridModel, ModelConfig, init_weights
from model.init import RESIDUAL_WRITERS

Build = Callable[..., ModelConfig]


def residual_writer_std(config: ModelConfig) -> float:
    model = HybridModel(config)
    writers = [p.flatten() for n, p in model.named_parameters() if n.endswith(RESIDUAL_WRITERS)]
    assert len(writers) == config.num_blocks
    return torch.cat(writers).std().item()


@pytest.mark.parametrize("kind", "M-*")
def test_residual_writers_shrink_with_depth(small_config: Build, kind: str) -> None:
    shallow, deep = (residual_writer_std(small_config(pattern=kind * n)) for n in (4, 40))
    assert shallow / deep == pytest.approx(math.sqrt(10), rel=0.03)


def test_other_matrices_keep_the_standard_deviation(small_config: Build) -> None:
    model = HybridModel(small_config(pattern="M-*" * 5, init_std=0.03))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not name.endswith((*RESIDUAL_WRITERS, "conv.weight")):
            spread = 3.5 / math.sqrt(2 * parameter.numel())
            assert parameter.std().item() == pytest.approx(0.03, rel=spread), name


def test_scan_parameters_lie_in_their_ranges(small_config: Build) -> None:
    model = HybridModel(small_config(pattern="M" * 20, dt_init_min=0.01, dt_init_max=0.2))
    mixers = [block.mamba for block in model.blocks]
    dt = torch.cat([torch.nn.functional.softplus(mixer.dt_bias) for mixer in mixers])
    a = torch.cat([mixer.A_log.exp() for mixer in mixers])
    assert 0.0099 < dt.min() < 0.02 < 0.1 < dt.max() < 0.201
    assert 1 <= a.min() < 3 < 14 < a.max() <= 16.001
    assert all((mixer.D == 1).all() and (mixer.norm.weight == 1).all() for mixer in mixers)
    assert all((mixer.conv.bias == 0).all() for mixer in mixers)
    assert all(mixer.conv.weight.abs().max() <= 0.5 for mixer in mixers)


def test_values_depend_on_seed_and_name_alone(small_config: Build) -> None:
    first = HybridModel(small_config(), seed=1)
    torch.manual_seed(99)
    with torch.device("meta"):
        later = HybridModel(small_config())
    later.to_empty(device="cpu")
    init_weights(later, seed=1)
    other = HybridModel(small_config(), seed=2)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, later.get_parameter(name)), name
        if parameter.std() > 0:
            assert not torch.equal(parameter, other.get_parameter(name)), name


def test_deeper_model_keeps_the_shared_blocks_values(small_config: Build) -> None:
    short = HybridModel(small_config(pattern="M-"))
    long = HybridModel(small_config(pattern="M-M*"))
    name = "blocks.0.mamba.in_zxbc.weight"
    assert torch.equal(short.get_parameter(name), long.get_parameter(name))


def test_building_draws_nothing_from_the_global_generator(small_config: Build) -> None:
    before = torch.get_rng_state()
    HybridModel(small_config())
    assert torch.equal(before, torch.get_rng_state())
