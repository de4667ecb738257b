"""Held-out loss of one domain, per token and per byte of text.

Which tokens count, the same for the model and for every baseline: each token that is predicted.
The first token of a document is given, not predicted; the end-of-document token is predicted and
stands for no text, so it adds to the loss and no bytes. Bits per byte therefore compare models of
different tokenizers, up to the first tokens of documents.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from evals.lm import LanguageModel
from evals.scoring import plan_batches, score_groups
from model.loss import IGNORED


class Rows(Protocol):
    """Packed rows of held-out text, as `pipeline.data.stream` makes them."""

    @property
    def tokens_BT(self) -> Tensor: ...

    @property
    def labels_BT(self) -> Tensor: ...

    @property
    def seq_idx_BT(self) -> Tensor: ...


@dataclass(frozen=True)
class DomainLoss:
    """Summed negative log-likelihood (nats) of `tokens` predicted tokens, `bytes` of text."""

    nats_sum: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per predicted token."""
        return self.nats_sum / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of predicted text."""
        return self.nats_sum / (math.log(2) * self.bytes)


def domain_loss(
    model: nn.Module, rows: Rows, token_bytes: np.ndarray, batch_size: int = 32
) -> DomainLoss:
    """Evaluate `model.token_losses` on all rows, `batch_size` rows at a time, in eval mode.

    Args:
        model: `model.HybridModel`, or whatever has its `token_losses`; its mode is restored.
        rows: tokens, labels (`IGNORED` where nothing is predicted) and document indices, [B, T].
        token_bytes: bytes of text that each token id stands for, [V]; 0 for the end of a document.
        batch_size: rows of one forward pass; decides memory and speed, and the result only of a
            quantized model, whose tensor scales span the batch.

    Raises:
        ValueError: when no position of the rows predicts a token that stands for text.
    """
    tokens, num_bytes = tokens_and_bytes(rows.labels_BT, token_bytes)
    count = -(-len(rows.tokens_BT) // batch_size)
    return DomainLoss(
        sum(batch_nats(model, rows, i, batch_size) for i in range(count)), tokens, num_bytes
    )


@torch.no_grad()
def batch_nats(model: nn.Module, rows: Rows, index: int, batch_size: int) -> float:
    """Summed negative log-likelihood (nats) of the rows' batch of that number, in eval mode."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    part = slice(index * batch_size, (index + 1) * batch_size)
    labels_BT = rows.labels_BT[part].to(device)
    losses_BT = model.token_losses(  # type: ignore[operator]
        rows.tokens_BT[part].to(device), labels_BT, rows.seq_idx_BT[part].to(device)
    )
    model.train(was_training)
    return losses_BT[labels_BT != IGNORED].double().sum().item()


def document_loss(
    lm: LanguageModel,
    documents: Sequence[Sequence[int]],
    num_bytes: Sequence[int],
    bytes_of_token: Callable[[int], int],
    max_length: int,
    batch_size: int = 32,
) -> DomainLoss:
    """The same of a model with a tokenizer of its own, on documents in its tokens, each with its
    end-of-text token.

    A document longer than `max_length` goes on after its window's last token, as in packed rows.

    Args:
        num_bytes: of each document's text.
        bytes_of_token: bytes of text that a document's first token stands for.
    """
    pairs = [
        (list(document[start : start + 1]), list(document[start + 1 : start + 1 + max_length]))
        for document in documents
        for start in range(0, len(document) - 1, max_length)
    ]
    nats = 0.0
    for batch in plan_batches(pairs, batch_size, share=False):
        nats -= sum(score for score, _ in score_groups(lm, batch))
    given = sum(bytes_of_token(document[0]) for document in documents)
    tokens = sum(len(continuation) for _, continuation in pairs)
    return DomainLoss(nats, tokens, sum(num_bytes) - given)


def tokens_and_bytes(labels_BT: Tensor, token_bytes: np.ndarray) -> tuple[int, int]:
    """The number of predicted tokens and the bytes of text that they stand for."""
    predicted = predicted_ids(labels_BT)
    num_bytes = int(token_bytes[predicted].sum())
    if num_bytes == 0:
        raise ValueError(
            "the held-out rows predict no text; hold more out (data.holdout_fraction, "
            "data.holdout_max_bytes)"
        )
    return len(predicted), num_bytes


def predicted_ids(labels_BT: Tensor) -> np.ndarray:
    """The ids of all predicted tokens, [number of predicted tokens] int64, row after row."""
    return labels_BT[labels_BT != IGNORED].cpu().numpy().astype(np.int64)
