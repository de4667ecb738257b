"""The chunked scan is the recurrence, in FP64 to 1e-10, and transformers' scan, in FP32: values,
states and gradients.

Legend: B batch, T tokens, H heads, P head dim, G groups, N state size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.packing import Packing
from model.ssd import chunked_scan, step_scan


def recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    seq_idx: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Token by token, the state cleared where a new document begins."""
    outputs = []
    for t in range(x.shape[1]):
        if t > 0:
            same = seq_idx[:, t] == seq_idx[:, t - 1]
            state = torch.where(same[:, None, None, None], state, torch.zeros_like(state))
        y, state = step_scan(x[:, t], dt[:, t], A, B[:, t], C[:, t], D, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def scan_inputs(tokens: int, groups: int, heads: int = 4, batch: int = 2) -> list[Tensor]:
    """x, dt, A, B, C, D and an initial state, FP64, requiring gradients."""
    head_dim, state = 5, 3
    inputs = [
        torch.randn(batch, tokens, heads, head_dim),
        torch.rand(batch, tokens, heads) * 0.5,
        -torch.rand(heads) * 4 - 0.5,
        torch.randn(batch, tokens, groups, state),
        torch.randn(batch, tokens, groups, state),
        torch.randn(heads),
        torch.randn(batch, heads, head_dim, state),
    ]
    return [value.double().requires_grad_() for value in inputs]


def documents(batch: int, tokens: int, count: int) -> Tensor:
    """Rows of ``count`` documents with random boundaries, int32."""
    starts = torch.zeros(batch, tokens, dtype=torch.int32)
    for row in starts:
        row[torch.randperm(tokens - 1)[: count - 1] + 1] = 1
    return starts.cumsum(1).to(torch.int32)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 16, 23, 64])
@pytest.mark.parametrize("count", [1, 5])
def test_scan_equals_the_recurrence_values_and_gradients(
    groups: int, chunk_size: int, count: int
) -> None:
    tokens = 23
    inputs = scan_inputs(tokens, groups)
    *others, initial = inputs
    seq_idx = documents(2, tokens, count)
    weights = [torch.randn(2, tokens, 4, 5).double(), torch.randn(2, 4, 5, 3).double()]

    def gradients(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        return torch.autograd.grad(loss, inputs)

    chunks = Packing(seq_idx, torch.float64).chunks(chunk_size)
    ours = chunked_scan(*others, chunks, initial_state_BHPN=initial)
    expected = recurrence(*others, seq_idx, initial)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)
    for mine, theirs in zip(gradients(ours), gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "chunk_size"), [(1, 4), (23, 7), (61, 16)])
def test_scan_equals_transformers_torch_path(groups: int, tokens: int, chunk_size: int) -> None:
    theirs = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    inputs = [v.detach().float().requires_grad_() for v in scan_inputs(tokens, groups)]
    x, dt, A, B, C, D, initial = inputs
    weights = [torch.randn(2, tokens, 4, 5), torch.randn(2, 4, 5, 3)]
    chunks = Packing(torch.zeros(2, tokens, dtype=torch.int32), torch.float32).chunks(chunk_size)
    results = []
    for y, state in (
        chunked_scan(x, dt, A, B, C, D, chunks, initial),
        theirs.mamba2_chunk_scan(
            x, dt, A, B, C, 8, D=D, initial_states=initial, return_final_states=True
        ),
    ):
        loss = (y * weights[0]).sum() + (state * weights[1]).sum()
        results.append((y, state, *torch.autograd.grad(loss, inputs)))
    for mine, other in zip(*results, strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


def test_rounding_errors_of_gradients_do_not_grow_with_the_row() -> None:
    tokens = 600
    seq_idx = torch.zeros(2, tokens, dtype=torch.int32)
    inputs = [v.detach().float().requires_grad_() for v in scan_inputs(tokens, 1)]
    exact = [v.detach().double().requires_grad_() for v in inputs]
    chunks = Packing(seq_idx, torch.float32).chunks(32)
    *others, initial = inputs
    *exact_others, exact_initial = exact
    ours, _ = chunked_scan(*others, chunks, initial_state_BHPN=initial)
    expected, _ = recurrence(*exact_others, seq_idx, exact_initial)
    weight = torch.randn(ours.shape)
    found = torch.autograd.grad((ours * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    for mine, true in zip(found, wanted, strict=True):
        assert (mine - true).abs().max() <= 1e-5 * true.abs().max()


def test_scan_without_initial_state_starts_from_zero() -> None:
    *others, initial = scan_inputs(17, 2)
    chunks = Packing(documents(2, 17, 3), torch.float64).chunks(4)
    y, state = chunked_scan(*others, chunks)
    y0, state0 = chunked_scan(*others, chunks, initial_state_BHPN=torch.zeros_like(initial))
    assert torch.equal(y, y0)
    assert torch.equal(state, state0)


def test_scan_in_two_calls_equals_one() -> None:
    x, dt, A, B, C, D, initial = (value.detach() for value in scan_inputs(20, 2))
    one = torch.zeros(2, 20, dtype=torch.int32)
    whole, last = chunked_scan(x, dt, A, B, C, D, Packing(one, x.dtype).chunks(8), initial)
    state, parts = initial, []
    for part in (slice(0, 9), slice(9, 20)):
        chunks = Packing(one[:, part], x.dtype).chunks(8)
        y, state = chunked_scan(
            x[:, part], dt[:, part], A, B[:, part], C[:, part], D, chunks, state
        )
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(state, last, atol=1e-10, rtol=1e-10)


def test_strong_decay_neither_overflows_nor_leaves_nan() -> None:
    x, dt, A, B, C, D, _ = (v.detach().float().requires_grad_() for v in scan_inputs(64, 2))
    chunks = Packing(documents(2, 64, 3), torch.float32).chunks(32)
    y, _ = chunked_scan(x, dt * 50, A * 20, B, C, D, chunks)
    y.square().sum().backward()
    assert all(v.grad.isfinite().all() for v in (x, dt, A, B, C, D))
