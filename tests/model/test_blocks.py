"""The hand-written gradients are the gradients, in FP64, whatever the cutting into pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model import blocking
from model.conv import CausalConv
from model.ffn import squared_relu
from model.norms import GatedRMSNorm, RMSNorm
from model.packing import Packing


@pytest.fixture(params=[1, 64, 1 << 18], ids=["tiny pieces", "small pieces", "one piece"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "CACHE_ELEMENTS", request.param)


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """The module in FP64 with random parameters."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.double()


def assert_same(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Equal values and gradients of all inputs, in FP64."""
    results = []
    for function in (ours, plain):
        y = function(*inputs)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        results.append((y, *torch.autograd.grad((y * weights).sum(), inputs)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.usefixtures("_pieces")
def test_rms_norm() -> None:
    norm = filled(RMSNorm(12, 1e-5))
    assert_same(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)),
        lambda x, w: F.rms_norm(x, (12,), w, 1e-5),
        leaf(3, 5, 12),
        leaf(12),
    )


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm_normalizes_each_group_apart(groups: int) -> None:
    norm = filled(GatedRMSNorm(12, groups, 1e-5))

    def plain(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        parts = (y * F.silu(z)).chunk(groups, dim=-1)
        normed = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in parts]
        return torch.cat(normed, dim=-1) * weight

    assert_same(
        lambda y, z, w: torch.func.functional_call(norm, {"weight": w}, (y, z)),
        plain,
        leaf(2, 5, 12),
        leaf(2, 5, 12),
        leaf(12),
    )


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("documents", [1, 3])
def test_convolution_sees_its_document_only(tokens: int, documents: int) -> None:
    conv = CausalConv(6, 4)
    seq_idx = (torch.arange(tokens) * documents // tokens).to(torch.int32).expand(3, tokens)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = []
        for t in range(tokens):
            total = bias.expand(3, 6)
            for lag in range(min(4, t + 1)):
                if seq_idx[0, t] == seq_idx[0, t - lag]:
                    total = total + x[:, t - lag] * weight[:, 3 - lag]
            rows.append(F.silu(total))
        return torch.stack(rows, dim=1)

    packing = Packing(seq_idx, torch.float64)
    assert_same(
        lambda x, w, b: torch.func.functional_call(conv, {"weight": w, "bias": b}, (x, packing)),
        plain,
        leaf(3, tokens, 6),
        leaf(6, 4),
        leaf(6),
    )


@pytest.mark.usefixtures("_pieces")
def test_squared_relu() -> None:
    assert_same(squared_relu, lambda x: x.relu() ** 2, leaf(4, 3, 10))


def test_norms_compute_in_fp32_and_return_the_input_dtype() -> None:
    norm = RMSNorm(64, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 64).bfloat16()
    expected = F.rms_norm(x.float(), (64,), norm.weight, 1e-5).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), expected, atol=0, rtol=2**-8)
