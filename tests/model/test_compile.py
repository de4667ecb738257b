"""Blocks through torch.compile: the same model, all graphs made by the first batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from model import HybridModel, ModelConfig, document_index

Build = Callable[..., ModelConfig]


@pytest.fixture(autouse=True)
def _no_graphs_left() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 101, (2, 21), generator=generator)
    return tokens, document_index(tokens, 5 + seed)


def loss_and_gradients(model: HybridModel, seed: int) -> list[Tensor]:
    tokens, seq_idx = batch(seed)
    loss, _ = model.loss(tokens, tokens.roll(-1, 1), seq_idx)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_blocks_train_the_same_model_traced_once(
    small_config: Build, checkpointing: str
) -> None:
    """Two blocks of a kind share graphs, and a second batch makes none."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    config = small_config(pattern="M-*M-*")
    model = HybridModel(config, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    expected = [loss_and_gradients(model, seed) for seed in (0, 1)]
    model.compile_blocks(count)  # type: ignore[arg-type]
    counts = []
    for seed, theirs in enumerate(expected):
        for mine, other in zip(loss_and_gradients(model, seed), theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)
        counts.append(len(graphs))
    assert counts[0] == counts[1]
    assert 3 <= counts[0] <= 12  # a block each of three kinds, cut at convolution and scan


@pytest.mark.slow
def test_inductor_is_as_near_to_fp64_as_eager(small_config: Build) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler")
    model = HybridModel(small_config())
    exact = loss_and_gradients(HybridModel(small_config(), torch.float64).double(), 0)
    eager = loss_and_gradients(model, 0)
    model.compile_blocks()
    compiled = loss_and_gradients(model, 0)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, value, plain, fused in zip(names, exact, eager, compiled, strict=True):
        # The scan's own parameters get sums that nearly cancel, of few and of many roundings.
        slack = 1e-2 if name.endswith(("A_log", "dt_bias", "in_dt.weight")) else 1e-6
        assert (fused - value).norm() < 4 * (plain - value).norm() + slack * value.norm(), name


@pytest.mark.slow
def test_recomputing_whole_blocks_gives_the_same_bits_compiled(small_config: Build) -> None:
    results = []
    for mode in ("none", "full"):
        model = HybridModel(small_config(), activation_checkpointing=mode)  # type: ignore[arg-type]
        model.compile_blocks("aot_eager")
        results.append(loss_and_gradients(model, 0))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
