"""Held-out loss while training goes on: in the recipe's precision and in BF16."""

from __future__ import annotations

import numpy as np

from evals.domains import domain_loss
from pipeline.config import TrainConfig
from pipeline.data.shards import Dataset
from pipeline.data.stream import validation_rows
from pipeline.train.trainable import Trainable


def validate(
    trainable: Trainable, dataset: Dataset, token_bytes: np.ndarray, train: TrainConfig
) -> dict[str, float]:
    """`loss_<precision>` of all tokens, and `<source>/loss_<precision>` of each source.

    Every rank computes all of it, so that the figures are the same on any number of them.
    """
    values = {}
    names = dataset.sources
    for label in ("recipe", "bf16"):
        nats, tokens = 0.0, 0
        with trainable.precision.override(label):
            trainable.prepare()
            for name in names:
                count = train.validation_tokens // len(names)
                rows = validation_rows(dataset, name, train.sequence_length, count)
                if not len(rows.tokens_BT):  # nothing of this source is held out
                    continue
                domain = domain_loss(trainable.model, rows, token_bytes, train.micro_batch)
                values[f"{name}/loss_{label}"] = domain.loss
                nats, tokens = nats + domain.nats_sum, tokens + domain.tokens
        trainable.reshard()
        values[f"loss_{label}"] = nats / max(tokens, 1)
    return values
