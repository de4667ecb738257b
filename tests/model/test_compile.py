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


def assert_same_as_eager(model: HybridModel, backend: str | Callable[..., object]) -> None:
    expected = [loss_and_gradients(model, seed) for seed in (0, 1)]
    model.compile_blocks(backend)  # type: ignore[arg-type]
    for seed, theirs in enumerate(expected):
        for mine, other in zip(loss_and_gradients(model, seed), theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_blocks_train_the_same_model_traced_once(
    small_config: Build, checkpointing: str
) -> None:
    """Two blocks of a kind share graphs, and a second batch makes none."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    counts = []
    for pattern in ("M-*", "M-*M-*"):
        torch.compiler.reset()
        graphs.clear()
        config = small_config(pattern=pattern)
        model = HybridModel(config, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
        assert_same_as_eager(model, count)
        counts.append(len(graphs))
        loss_and_gradients(model, 3)
        assert len(graphs) == counts[-1]
    assert counts[0] == counts[1] > 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_trains_the_same_model(small_config: Build, dtype: torch.dtype) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler")
    model = HybridModel(small_config(), torch.float32)
    if dtype == torch.float32:
        assert_same_as_eager(model, "inductor")
        return
    narrow = HybridModel(small_config(), dtype)
    narrow.compile_blocks()
    exact = loss_and_gradients(model, 0)
    for mine, theirs in zip(loss_and_gradients(narrow, 0), exact, strict=True):
        assert (mine - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_gives_the_same_bits_compiled(
    small_config: Build, checkpointing: str
) -> None:
    results = []
    for mode in ("none", checkpointing):
        model = HybridModel(small_config(), activation_checkpointing=mode)  # type: ignore[arg-type]
        model.compile_blocks("aot_eager")
        results.append(loss_and_gradients(model, 0))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
