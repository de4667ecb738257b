"""Bits per byte by hand, and what counts as a predicted token."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evals.domains import IGNORED, domain_loss


class FakeModel(nn.Module):
    """Loses one nat a token id: a label of 3 costs 3 nats. Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls: list[tuple[int, bool, bool]] = []

    def token_losses(self, tokens_BT: Tensor, labels_BT: Tensor, seq_idx_BT: Tensor) -> Tensor:
        assert tokens_BT.shape == labels_BT.shape == seq_idx_BT.shape
        self.calls.append((len(tokens_BT), self.training, torch.is_grad_enabled()))
        return labels_BT.float()  # -100 where ignored: a loss that must not be counted


TOKEN_BYTES = np.array([0, 1, 2, 5])  # id 0 ends a document


def rows(labels: list[list[int]]) -> SimpleNamespace:
    labels_BT = torch.tensor(labels)
    zeros = torch.zeros_like(labels_BT)
    return SimpleNamespace(tokens_BT=zeros, labels_BT=labels_BT, seq_idx_BT=zeros)


def test_loss_and_bits_per_byte_by_hand() -> None:
    result = domain_loss(FakeModel(), rows([[1, 2, 0, IGNORED], [3, 3, 0, IGNORED]]), TOKEN_BYTES)
    assert (result.nats_sum, result.tokens, result.bytes) == (9.0, 6, 13)
    assert result.loss == pytest.approx(1.5)
    assert result.bits_per_byte == pytest.approx(9 / math.log(2) / 13)


def test_the_end_of_a_document_adds_to_the_tokens_and_not_to_the_bytes() -> None:
    without = domain_loss(FakeModel(), rows([[3, IGNORED]]), TOKEN_BYTES)
    with_end = domain_loss(FakeModel(), rows([[3, 0]]), TOKEN_BYTES)
    assert (with_end.tokens, with_end.bytes) == (without.tokens + 1, without.bytes)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_batch_size_changes_nothing_but_the_calls(batch_size: int) -> None:
    model = FakeModel()
    result = domain_loss(model, rows([[1, 2], [3, IGNORED], [2, 2]]), TOKEN_BYTES, batch_size)
    assert (result.nats_sum, result.tokens, result.bytes) == (10.0, 5, 12)
    assert len(model.calls) == -(-3 // batch_size)


def test_evaluates_without_gradient_in_eval_mode_and_restores_the_mode() -> None:
    model = FakeModel().train()
    domain_loss(model, rows([[1]]), TOKEN_BYTES)
    assert model.calls == [(1, False, False)]
    assert model.training


def test_rows_without_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.holdout_fraction"):
        domain_loss(FakeModel(), rows([[IGNORED, 0]]), TOKEN_BYTES)
