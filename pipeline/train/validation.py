"""Held-out loss while training goes on: in the recipe's precision and in BF16."""

from __future__ import annotations

import numpy as np
import torch

from evals.domains import Rows, batch_nats, tokens_and_bytes
from pipeline.config import TrainConfig
from pipeline.data.shards import Dataset
from pipeline.data.stream import validation_rows
from pipeline.train.parallel import Rank, all_reduce
from pipeline.train.trainable import Trainable

SCALE = 2.0**24  # FP64 sums of multiples of 2^-24 nats are exact up to 5e8 nats


def validate(
    trainable: Trainable, dataset: Dataset, token_bytes: np.ndarray, train: TrainConfig
) -> dict[str, float]:
    """`loss_<precision>` of all tokens, and `<source>/loss_<precision>` of each source.

    Ranks share the micro-batches. Each gives whole multiples of 2^-24 nats, so that the figures are
    the same bits on any number of ranks that hold the same weights.
    """
    count = train.validation_tokens // len(dataset.sources)
    every = {
        name: validation_rows(dataset, name, train.sequence_length, count)
        for name in dataset.sources
    }
    rows = {name: found for name, found in every.items() if len(found.tokens_BT)}
    tokens = {name: tokens_and_bytes(rows[name].labels_BT, token_bytes)[0] for name in rows}
    values: dict[str, float] = {}
    for label in ("recipe", "bf16"):
        with trainable.precision.override(label):
            trainable.prepare()
            own = [_own_nats(trainable, found, train.micro_batch) for found in rows.values()]
        trainable.reshard()
        device = next(trainable.model.parameters()).device
        nats = torch.tensor(own, dtype=torch.float64, device=device)
        all_reduce(nats)
        losses = dict(zip(rows, nats.tolist(), strict=True))
        values |= {f"{name}/loss_{label}": losses[name] / tokens[name] for name in rows}
        values[f"loss_{label}"] = sum(losses.values()) / max(sum(tokens.values()), 1)
    return values


def _own_nats(trainable: Trainable, rows: Rows, micro_batch: int) -> float:
    """Of this rank's micro-batches, in whole quanta.

    Where weights are shared all ranks run equally many; one more than there are counts nothing.
    """
    rank, count = Rank.current(), -(-len(rows.tokens_BT) // micro_batch)
    rounds = -(-count // rank.size) if trainable.weights is not None else 0
    own = list(rank.micro_batches(count))
    found = [batch_nats(trainable.model, rows, index, micro_batch) for index in own]
    for _ in range(rounds - len(own)):
        batch_nats(trainable.model, rows, 0, micro_batch)
    return sum(round(nats * SCALE) for nats in found) / SCALE
