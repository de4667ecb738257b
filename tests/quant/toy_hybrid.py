"""A hybrid small enough for every test, with the names of a real one; a linear alone; helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import quant.linear as linear_module
from quant import Precision, QuantizedTensor, QuantLinear, apply_recipe, named_recipe

HIDDEN, WIDE = 64, 128
SEED = 11


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(HIDDEN, WIDE), linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_zxbc, self.in_dt = linear(HIDDEN, WIDE), linear(HIDDEN, 8)
        self.out = linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        dt = torch.sigmoid(self.in_dt(x)).mean(-1, keepdim=True)
        return self.out(torch.tanh(self.in_zxbc(x)) * dt)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o(torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v)


KINDS: dict[str, type[nn.Module]] = {"mamba": Mamba, "ffn": Ffn, "attention": Attention}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.add_module(kind, KINDS[kind]())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_submodule(self.kind)(x)


class ToyHybrid(nn.Module):
    """Blocks mamba, ffn, attention, ffn; then a head."""

    num_blocks = 4

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(Block(k) for k in ("mamba", "ffn", "attention", "ffn"))
            self.head = linear(HIDDEN, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(tokens: int = 48, seed: int = 1) -> Tensor:
    """[2, tokens / 2, HIDDEN]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens // 2, HIDDEN, generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def build(recipe: str = "nvfp4_paper", backend: str | None = None) -> tuple[ToyHybrid, Precision]:
    model = ToyHybrid()
    chosen = named_recipe(recipe).with_blocks(0, 0)
    precision = apply_recipe(model, chosen, num_blocks=4, seed=SEED, backend=backend)
    precision.begin(0, 0)
    return model, precision


def one_linear(
    recipe: str = "nvfp4_paper", inputs: int = 64, outputs: int = 96, backend: str | None = None
) -> tuple[QuantLinear, Precision]:
    """A single linear, `ffn.up` of the only block, with index 0."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Module()])
    model.blocks[0].up = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        model.blocks[0].up.weight.copy_(normal(outputs, inputs, seed=5) / 8)
    chosen = named_recipe(recipe).with_blocks(0, 0)
    precision = apply_recipe(model, chosen, num_blocks=1, seed=SEED, backend=backend)
    precision.begin(0, 0)
    return precision.layers["blocks.0.up"], precision


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx; the weight's gradient stays on the layer."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def weight_gradient(layer: QuantLinear) -> Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


def loss(model: nn.Module, seed: int) -> Tensor:
    return model(batch(seed=seed)).square().mean()


@contextmanager
def recorded_copies() -> Iterator[list[tuple[Tensor, QuantizedTensor, QuantizedTensor]]]:
    """Every (tensor, row copy, column copy) that passes through the layers."""
    made: list[tuple[Tensor, QuantizedTensor, QuantizedTensor]] = []
    original = linear_module.quantize_rowcol

    def record(x: Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = original(x, *args, **kwargs)
        made.append((x.detach(), result.row, result.column))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "quantize_rowcol", record)
        yield made
