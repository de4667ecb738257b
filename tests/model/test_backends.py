"""The CUDA kernels' calls, made to stand-ins that hold them to the packages' contracts.

No GPU is used: CPU tensors pass for CUDA ones, and each stand-in checks what the real function
checks (shapes, dtypes, strides, document numbers) and computes the same by plain formulas, document
by document. What the real kernels give is not tested here.

Legend: B batch, C channels, T tokens, K taps, N = B T.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model import HybridModel, ModelConfig, backends, document_index
from model.ssd import step_scan

Build = Callable[..., ModelConfig]
CUDA = torch.device("cuda")


def check_seq_idx(seq_idx: Tensor, batch: int, tokens: int) -> None:
    assert seq_idx.dtype == torch.int32
    assert seq_idx.is_contiguous()
    assert seq_idx.shape == (batch, tokens)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """csrc/causal_conv1d.cpp: channels last for seq_idx, strides and channels multiples of 8."""
    batch, channels, tokens = x.shape
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert x.stride(1) == 1
    assert channels % 8 == x.stride(2) % 8 == x.stride(0) % 8 == x.storage_offset() % 8 == 0
    assert weight.shape == (channels, weight.shape[1])
    assert 2 <= weight.shape[1] <= 4
    assert bias is not None
    assert bias.dtype == weight.dtype == torch.float32
    assert bias.shape == (channels,)
    assert activation == "silu"
    assert seq_idx is not None
    check_seq_idx(seq_idx, batch, tokens)
    out = []
    for t in range(tokens):
        total = bias.expand(batch, channels)
        for lag in range(min(weight.shape[1], t + 1)):
            same = (seq_idx[:, t] == seq_idx[:, t - lag])[:, None]
            total = total + (x[:, :, t - lag] * weight[:, weight.shape[1] - 1 - lag]).where(same, 0)
        out.append(F.silu(total).to(x.dtype))
    return torch.stack(out, dim=1).transpose(1, 2)  # channels last, as the input


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """mamba_ssm/ops/triton/ssd_combined.py: one dtype for x, B and C, the rest FP32."""
    batch, tokens, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    assert x.dtype == B.dtype == C.dtype
    assert x.stride(-1) == B.stride(-1) == C.stride(-1) == 1
    assert heads % groups == 0
    assert B.shape == C.shape == (batch, tokens, groups, state_size)
    assert dt.shape == (batch, tokens, heads)
    assert D is not None
    assert A.shape == D.shape == (heads,)
    assert A.dtype == dt.dtype == D.dtype == torch.float32
    assert isinstance(chunk_size, int)
    assert seq_idx is not None
    check_seq_idx(seq_idx, batch, tokens)
    assert z is dt_bias is initial_states is cu_seqlens is None
    assert not dt_softplus
    state, outputs = x.new_zeros(batch, heads, head_dim, state_size, dtype=torch.float32), []
    for t in range(tokens):
        if t:
            state = state.where((seq_idx[:, t] == seq_idx[:, t - 1]).view(-1, 1, 1, 1), 0)
        step = x[:, t].float(), dt[:, t], A, B[:, t].float(), C[:, t].float(), D
        y, state = step_scan(*step, state)
        outputs.append(y.to(x.dtype))
    y_BTHP = torch.stack(outputs, dim=1)
    return (y_BTHP, state) if return_final_states else y_BTHP


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch/nn/attention/varlen.py: [tokens, heads, head dim], causal by its window."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size == (-1, 0)
    for bounds, longest in ((cu_seq_q, max_q), (cu_seq_k, max_k)):
        assert bounds.dtype == torch.int32
        assert bounds[0] == 0
        assert bounds[-1] == len(query) == len(key) == len(value)
        assert isinstance(longest, int)
        assert longest == bounds.diff().max()
        assert bounds.diff().min() > 0
    outputs = []
    for first, last in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (part[first:last].transpose(0, 1)[None] for part in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(y[0].transpose(0, 1))
    return torch.cat(outputs)


def forget() -> None:
    backends._import_mamba_kernels.cache_clear()
    backends._import_varlen_attention.cache_clear()


@pytest.fixture
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors count as CUDA ones, and the stand-ins as installed."""
    conv, package, ops, triton, combined, varlen = (
        ModuleType(name)
        for name in (
            "causal_conv1d",
            "mamba_ssm",
            "mamba_ssm.ops",
            "mamba_ssm.ops.triton",
            "mamba_ssm.ops.triton.ssd_combined",
            "torch.nn.attention.varlen",
        )
    )
    conv.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    combined.mamba_chunk_scan_combined = mamba_chunk_scan_combined  # type: ignore[attr-defined]
    varlen.varlen_attn = varlen_attn  # type: ignore[attr-defined]
    for module in (conv, package, ops, triton, combined, varlen):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "is_cuda", lambda device: True)
    forget()
    yield
    forget()


def shape_for_kernels(small_config: Build, **changes: Any) -> ModelConfig:
    return small_config(mamba_head_dim=16, mamba_state_size=8, **changes)


def packed_batch() -> tuple[Tensor, Tensor]:
    """Rows whose documents end at 5s, in the middle of chunks and at their edges."""
    tokens = torch.randint(6, 101, (3, 24))
    tokens[0, [2, 7, 8]] = tokens[1, 15] = 5
    return tokens, document_index(tokens, 5)


def loss_and_gradients(model: HybridModel, tokens: Tensor, seq_idx: Tensor) -> list[Tensor]:
    loss, _ = model.loss(tokens, tokens.roll(-1, 1), seq_idx)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("rope_theta", [None, 100.0])
def test_kernels_are_called_as_they_ask_and_train_the_same_model(
    small_config: Build, rope_theta: float | None, request: pytest.FixtureRequest
) -> None:
    config = shape_for_kernels(small_config, rope_theta=rope_theta)
    model = HybridModel(config, torch.bfloat16)
    batch = packed_batch()
    exact = loss_and_gradients(HybridModel(config), *batch)
    by_torch = loss_and_gradients(model, *batch)
    request.getfixturevalue("_as_on_cuda")
    assert "mamba-ssm" in model.paths()["mamba"]
    assert "varlen_attn" in model.paths()["attention"]
    by_kernels = loss_and_gradients(model, *batch)
    for value, plain, fast in zip(exact, by_torch, by_kernels, strict=True):
        # Both round to BF16, in other places.
        assert (fast - value).norm() < 2 * (plain - value).norm() + 2**-8 * value.norm()


def test_prefill_by_kernels_leaves_the_state_that_steps_continue(
    small_config: Build, request: pytest.FixtureRequest
) -> None:
    model = HybridModel(shape_for_kernels(small_config, init_std=0.2), torch.bfloat16)
    prompts = [[5, 9, 3, 3, 8, 40, 41], [7], [12, 13, 14]]
    expected = model.generate(prompts, 4, eos_id=-1)
    request.getfixturevalue("_as_on_cuda")
    assert model.generate(prompts, 4, eos_id=-1) == expected


@pytest.mark.usefixtures("_as_on_cuda")
def test_a_document_s_bits_do_not_depend_on_the_others(small_config: Build) -> None:
    model = HybridModel(shape_for_kernels(small_config), torch.bfloat16)
    tokens, seq_idx = packed_batch()
    changed = seq_idx == 1
    changed[1:] = False
    other = tokens.where(~changed | (tokens == 5), (tokens + 30) % 95 + 6)
    before, after = (model.logits(ids, seq_idx)[~changed] for ids in (tokens, other))
    assert torch.equal(before, after)


@pytest.mark.usefixtures("_as_on_cuda")
@pytest.mark.parametrize(
    ("changes", "dtype", "kind", "reason"),
    [
        ({"mamba_conv_kernel": 5}, torch.bfloat16, "mamba", "at most 4 taps, not 5"),
        ({"mamba_head_dim": 3, "mamba_num_heads": 4}, torch.bfloat16, "mamba", "not 12"),
        ({}, torch.float64, "mamba", "float64"),
        ({"attention_head_dim": 12}, torch.bfloat16, "attention", "not 12"),
        ({}, torch.float32, "attention", "float32"),
    ],
)
def test_a_shape_that_a_kernel_does_not_take_runs_on_torch_and_says_why(
    small_config: Build, changes: dict, dtype: torch.dtype, kind: str, reason: str
) -> None:
    model = HybridModel(small_config(**{"mamba_state_size": 8} | changes), dtype)
    path = model.paths()[kind]
    assert path.startswith(("torch (", "scaled_dot_product_attention, masked ("))
    assert reason in path
    tokens, seq_idx = packed_batch()
    assert model.loss(tokens, tokens, seq_idx)[0].isfinite()


def test_a_package_that_fails_to_import_leaves_the_torch_path(
    small_config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    forget()
    path = backends.paths(shape_for_kernels(small_config), CUDA, torch.bfloat16)["mamba"]
    forget()
    assert path.startswith("torch (no mamba-ssm with causal-conv1d: ")
    assert "causal_conv1d" in path
