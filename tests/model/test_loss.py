"""The sliced cross-entropy is the plain one, never holds more than a slice, and is a sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model import HybridModel, ModelConfig, loss
from model.loss import chunked_cross_entropy, token_cross_entropy

Build = Callable[..., ModelConfig]
VOCAB = 37


def problem() -> tuple[torch.nn.Linear, Tensor, Tensor]:
    head = torch.nn.Linear(8, VOCAB, bias=False)
    labels = torch.randint(0, VOCAB, (50,))
    labels[::7] = -100
    return head, torch.randn(50, 8, requires_grad=True), labels


@pytest.mark.parametrize("slice_elements", [1, VOCAB * 7, VOCAB * 50])
def test_sliced_loss_and_gradients_equal_plain(
    slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", slice_elements)
    head, x, labels = problem()
    plain = F.cross_entropy(head(x), labels, reduction="sum")
    expected = torch.autograd.grad(plain * 0.25, [x, head.weight])
    ours = chunked_cross_entropy(head, x, labels, VOCAB)
    gradients = torch.autograd.grad(ours * 0.25, [x, head.weight])
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    per_token = F.cross_entropy(head(x), labels, reduction="none")
    torch.testing.assert_close(token_cross_entropy(head, x, labels, VOCAB), per_token)


def test_no_tensor_exceeds_a_slice_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", VOCAB * 7)
    head, x, labels = problem()
    seen = []

    def watched(x_MD: Tensor) -> Tensor:
        seen.append(x_MD.shape[0])
        return head(x_MD)

    chunked_cross_entropy(watched, x, labels, VOCAB).backward()
    assert max(seen) == 7
    assert sum(seen) == 2 * 50, "each slice is computed forward, and again in the backward pass"


def test_logits_far_from_zero_neither_overflow_nor_lose_the_loss() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]])
    labels = torch.tensor([1, 2])
    ours = chunked_cross_entropy(lambda x: x.clone(), logits, labels, 3)
    torch.testing.assert_close(ours, F.cross_entropy(logits, labels, reduction="sum"))


def test_all_labels_ignored_gives_zero_loss_and_zero_gradient() -> None:
    head, x, labels = problem()
    total = chunked_cross_entropy(head, x, torch.full_like(labels, -100), VOCAB)
    total.backward()
    assert total.item() == 0
    assert not x.grad.any()
    assert not head.weight.grad.any()


def test_a_second_backward_through_the_overwritten_logits_is_refused() -> None:
    head, x, labels = problem()
    total = chunked_cross_entropy(head, x, labels, VOCAB)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        total.backward()


def test_loss_is_a_sum_that_no_batch_split_changes(small_config: Build) -> None:
    model = HybridModel(small_config())
    tokens = torch.randint(0, 101, (8, 12))
    labels = tokens.roll(-1, 1)
    labels[torch.rand(8, 12) < 0.4] = -100
    seq_idx = torch.zeros(8, 12, dtype=torch.int32)
    results = []
    for rows in (8, 4, 1):
        model.zero_grad()
        counts = []
        for part in zip(*(v.split(rows) for v in (tokens, labels, seq_idx)), strict=True):
            total, count = model.loss(*part)
            assert total.dtype == torch.float32
            assert count.dtype == torch.int64
            total.backward()
            counts.append(count)
        assert sum(counts) == (labels != -100).sum()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_token_losses_sum_to_the_loss(small_config: Build) -> None:
    model = HybridModel(small_config())
    tokens = torch.randint(0, 101, (2, 12))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    seq_idx = torch.zeros(2, 12, dtype=torch.int32)
    losses = model.token_losses(tokens, labels, seq_idx)
    assert losses.shape == (2, 12)
    assert not losses.requires_grad
    assert not losses[:, -1].any()
    torch.testing.assert_close(losses.sum(), model.loss(tokens, labels, seq_idx)[0])
