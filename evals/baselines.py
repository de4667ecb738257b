"""Unigram and bigram language models over the same tokens: what a trained model must beat.

Both are fitted to the training tokens of a domain and scored on exactly the predicted tokens of
`evals.domains`. The bigram is Jelinek and Mercer's (1980), with the weight of the bigram relative
frequency tied over contexts of similar count:

    P(b | a) = w[bucket(c(a))] c(a, b) / c(a) + (1 - w[bucket(c(a))]) P(b)

P(b) is the add-one unigram, and `bucket` doubles the count from one bucket to the next. The weights
maximize the likelihood of a tenth of the *training* documents under counts of the other nine
tenths (expectation maximization); the final counts take in all of them. Nothing of the evaluated
text is ever looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evals.domains import IGNORED, DomainLoss, Rows

CHUNK = 2_000_000  # tokens counted at a time, which bounds the memory of the sort
SLICE = 10  # one document in so many decides the weights
EM_STEPS = 30


@dataclass(frozen=True)
class PairCounts:
    """How often each pair of neighbours occurs.

    `keys` are `previous * vocab_size + following`, sorted and unique; both arrays are [P] int64.
    """

    vocab_size: int
    keys: np.ndarray
    counts: np.ndarray

    @property
    def previous_counts(self) -> np.ndarray:
        """c(a): how often each token stands before another, [V]."""
        return self._sums(self.keys // self.vocab_size)

    @property
    def following_counts(self) -> np.ndarray:
        """How often each token is predicted, [V]."""
        return self._sums(self.keys % self.vocab_size)

    def _sums(self, ids: np.ndarray) -> np.ndarray:
        sums = np.bincount(ids, weights=self.counts, minlength=self.vocab_size)
        return sums.astype(np.int64)

    def lookup(self, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
        """c(a, b) of each pair, 0 where it never occurred, [N] int64."""
        wanted = previous * self.vocab_size + following
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[place] == wanted, self.counts[place], 0)


def count_pairs(tokens: np.ndarray, vocab_size: int, eos_id: int) -> PairCounts:
    """Count the pairs of neighbours within documents of a token stream, [N] unsigned.

    A pair that begins with the end-of-document token spans two documents and is left out.
    """
    parts = []
    for start in range(0, max(len(tokens) - 1, 0), CHUNK):
        window = tokens[start : start + CHUNK + 1].astype(np.int64)
        previous, following = window[:-1], window[1:]
        keys = (previous * vocab_size + following)[previous != eos_id]
        parts.append(PairCounts(vocab_size, *np.unique(keys, return_counts=True)))
    return _merge(parts, vocab_size)


def _merge(parts: list[PairCounts], vocab_size: int) -> PairCounts:
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, np.int64)
    keys, place = np.unique(
        np.concatenate([empty, *(part.keys for part in parts)]), return_inverse=True
    )
    counts = np.concatenate([empty, *(part.counts for part in parts)])
    totals = np.bincount(place, weights=counts, minlength=len(keys)).astype(np.int64)
    return PairCounts(vocab_size, keys, totals)


@dataclass(frozen=True)
class Unigram:
    """P(b) = (c(b) + 1) / (N + V)."""

    table: np.ndarray

    @staticmethod
    def fit(counts: PairCounts) -> Unigram:
        smoothed = counts.following_counts + 1.0
        return Unigram(smoothed / smoothed.sum())

    def probabilities(self, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
        """P(following), [N]; `previous` is not looked at."""
        return self.table[following]


@dataclass(frozen=True)
class Bigram:
    """The interpolated bigram of the module's docstring; `weights` by bucket."""

    unigram: Unigram
    counts: PairCounts
    context_counts: np.ndarray
    weights: np.ndarray

    @staticmethod
    def fit(tokens: np.ndarray, vocab_size: int, eos_id: int) -> Bigram:
        """Fit counts and weights to a training stream, [N] unsigned. Raises `ValueError`."""
        document = np.cumsum(tokens == eos_id, dtype=np.int32)
        document[1:] = document[:-1].copy()  # the end belongs to the document that it ends
        document[:1] = 0
        in_slice = document % SLICE == SLICE - 1
        held_out = count_pairs(tokens[in_slice], vocab_size, eos_id)
        rest = count_pairs(tokens[~in_slice], vocab_size, eos_id)
        everything = _merge([rest, held_out], vocab_size)
        if len(rest.keys) == 0:
            raise ValueError("no training text to fit a bigram to")
        weights = _fit_weights(rest, held_out)
        context_counts = everything.previous_counts
        return Bigram(Unigram.fit(everything), everything, context_counts, weights)

    def probabilities(self, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
        """P(following | previous), [N] float64."""
        context = self.context_counts[previous]
        relative = self.counts.lookup(previous, following) / np.maximum(context, 1)
        weight = self.weights[_bucket(context)]
        return weight * relative + (1 - weight) * self.unigram.probabilities(previous, following)


def _bucket(counts: np.ndarray) -> np.ndarray:
    """0 for 0, 1 for 1, 2 for 2-3, 3 for 4-7, ... : the number of binary digits."""
    return np.frexp(counts.astype(np.float64))[1]


def _fit_weights(rest: PairCounts, held_out: PairCounts) -> np.ndarray:
    """The weight of each bucket, [64], by expectation maximization on the held-out pairs.

    One more pair for either side keeps each weight off 0 and 1, and at one half where no held-out
    pair falls into the bucket. An unseen context gets 0.
    """
    weights = np.full(64, 0.5)
    previous, following = np.divmod(held_out.keys, held_out.vocab_size)
    context = rest.previous_counts[previous]
    bucket = _bucket(context)
    relative = rest.lookup(previous, following) / np.maximum(context, 1)
    backoff = Unigram.fit(rest).probabilities(previous, following)
    total = np.bincount(bucket, weights=held_out.counts, minlength=64)
    for _ in range(EM_STEPS):
        weight = weights[bucket]
        share = weight * relative / (weight * relative + (1 - weight) * backoff)
        won = np.bincount(bucket, weights=held_out.counts * share, minlength=64)
        weights = (won + 1) / (total + 2)
    weights[0] = 0.0
    return weights


def baseline_loss(baseline: Unigram | Bigram, rows: Rows, token_bytes: np.ndarray) -> DomainLoss:
    """The loss of a baseline on the predicted tokens of held-out rows, as `domain_loss` counts."""
    predicted_BT = rows.labels_BT != IGNORED
    following = rows.labels_BT[predicted_BT].cpu().numpy().astype(np.int64)
    previous = rows.tokens_BT[predicted_BT].cpu().numpy().astype(np.int64)
    nats = -np.log(baseline.probabilities(previous, following)).sum()
    return DomainLoss(float(nats), len(following), int(token_bytes[following].sum()))
