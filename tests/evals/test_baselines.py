"""The baselines against brute force, and that they never see what they are scored on."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evals import baselines
from evals.baselines import Bigram, Unigram, baseline_loss, count_pairs
from evals.domains import IGNORED

EOS = 0
VOCAB = 7


def stream(num_documents: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    """Documents in which each token mostly decides the next."""
    rng = np.random.default_rng(seed)
    tokens = []
    for _ in range(num_documents):
        token = int(rng.integers(1, vocab))
        for _ in range(int(rng.integers(2, 30))):
            tokens.append(token)
            token = token % (vocab - 1) + 1 if rng.random() < 0.8 else int(rng.integers(1, vocab))
        tokens.append(EOS)
    return np.array(tokens, np.uint16)


def held_out(tokens: np.ndarray) -> SimpleNamespace:
    tokens_BT = torch.from_numpy(tokens.astype(np.int64))[None]
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    labels_BT[:, :-1] = tokens_BT[:, 1:]
    labels_BT[tokens_BT == EOS] = IGNORED
    return SimpleNamespace(tokens_BT=tokens_BT, labels_BT=labels_BT)


def pairs(tokens: np.ndarray) -> list[tuple[int, int]]:
    ids = tokens.tolist()
    return [(a, b) for a, b in itertools.pairwise(ids) if a != EOS]


def documents(tokens: np.ndarray) -> list[np.ndarray]:
    ends = np.flatnonzero(tokens == EOS) + 1
    return np.split(tokens, ends)[: len(ends)]


@pytest.mark.parametrize("chunk", [3, 50, 2_000_000])
def test_pairs_are_counted_within_documents(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(baselines, "CHUNK", chunk)
    tokens = stream(20)
    expected = Counter(pairs(tokens))
    counts = count_pairs(tokens, VOCAB, EOS)
    found = {divmod(int(k), VOCAB): int(c) for k, c in zip(counts.keys, counts.counts, strict=True)}
    assert found == expected


def test_unigram_is_the_add_one_estimate_of_predicted_tokens() -> None:
    tokens = stream(20)
    predicted = Counter(b for _, b in pairs(tokens))
    unigram = Unigram.fit(count_pairs(tokens, VOCAB, EOS))
    total = predicted.total()
    assert unigram.table == pytest.approx(
        [(predicted[b] + 1) / (total + VOCAB) for b in range(VOCAB)]
    )


def brute_force_weights(tokens: np.ndarray) -> dict[int, float]:
    """Expectation maximization in plain Python: every tenth document against the other nine."""
    parts = documents(tokens)
    rest = [pair for i, part in enumerate(parts) if i % 10 != 9 for pair in pairs(part)]
    tenth = [pair for i, part in enumerate(parts) if i % 10 == 9 for pair in pairs(part)]
    joint, first = Counter(rest), Counter(a for a, _ in rest)
    second = Counter(b for _, b in rest)
    weights: dict[int, float] = {}
    for _ in range(baselines.EM_STEPS):
        shares: dict[int, list[float]] = {}
        for a, b in tenth:
            bucket = first[a].bit_length()
            weight = weights.get(bucket, 0.5)
            bigram = joint[a, b] / max(first[a], 1)
            unigram = (second[b] + 1) / (len(rest) + VOCAB)
            share = weight * bigram / (weight * bigram + (1 - weight) * unigram)
            shares.setdefault(bucket, []).append(share)
        weights = {bucket: (sum(each) + 1) / (len(each) + 2) for bucket, each in shares.items()}
    return weights


def test_bigram_equals_a_brute_force_one() -> None:
    tokens, evaluated = stream(60), stream(5, seed=1)
    weights = brute_force_weights(tokens)
    joint, first = Counter(pairs(tokens)), Counter(a for a, _ in pairs(tokens))
    second = Counter(b for _, b in pairs(tokens))
    nats = 0.0
    for a, b in pairs(evaluated):
        weight = weights.get(first[a].bit_length(), 0.5) if first[a] else 0.0
        unigram = (second[b] + 1) / (second.total() + VOCAB)
        nats -= math.log(weight * joint[a, b] / max(first[a], 1) + (1 - weight) * unigram)
    result = baseline_loss(Bigram.fit(tokens, VOCAB, EOS), held_out(evaluated), np.ones(VOCAB, int))
    assert result.nats_sum == pytest.approx(nats)
    assert result.tokens == len(pairs(evaluated))


def test_probabilities_sum_to_one_after_every_token_even_one_never_seen() -> None:
    vocab = VOCAB + 2
    bigram = Bigram.fit(stream(60), vocab, EOS)
    everything = np.arange(vocab)
    for previous in range(1, vocab):
        total = bigram.probabilities(np.full(vocab, previous), everything).sum()
        assert total == pytest.approx(1.0)


def test_fitting_looks_at_the_training_tokens_alone() -> None:
    bigram = Bigram.fit(stream(60), VOCAB, EOS)
    before = bigram.weights.copy()
    one = baseline_loss(bigram, held_out(stream(5, seed=1)), np.ones(VOCAB, int))
    baseline_loss(bigram, held_out(stream(50, seed=2)), np.ones(VOCAB, int))
    again = baseline_loss(bigram, held_out(stream(5, seed=1)), np.ones(VOCAB, int))
    assert one == again
    assert np.array_equal(bigram.weights, before)


def test_bigram_beats_unigram_on_structured_text_and_keeps_up_on_noise() -> None:
    evaluated = held_out(stream(20, seed=1))
    bigram = Bigram.fit(stream(200), VOCAB, EOS)
    structured = [
        baseline_loss(m, evaluated, np.ones(VOCAB, int)) for m in (bigram.unigram, bigram)
    ]
    assert structured[1].loss < 0.7 * structured[0].loss

    noise = np.random.default_rng(0).integers(0, 200, 20_000).astype(np.uint16)
    bigram = Bigram.fit(noise, 200, EOS)
    rows = held_out(np.random.default_rng(1).integers(0, 200, 5_000))
    unigram_loss, bigram_loss = (
        baseline_loss(m, rows, np.ones(200, int)).loss for m in (bigram.unigram, bigram)
    )
    assert bigram_loss < 1.01 * unigram_loss  # relative frequencies alone would be infinitely bad


def test_training_text_that_repeats_itself_leaves_room_for_the_unseen() -> None:
    document = np.array([1, 2, 3, EOS], np.uint16)
    rows = held_out(np.array([3, 1, 2, EOS], np.uint16))  # a pair never seen, and seen ones
    assert (
        baseline_loss(Bigram.fit(np.tile(document, 50), VOCAB, EOS), rows, np.ones(VOCAB, int)).loss
        < 10
    )


def test_a_stream_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no training text"):
        Bigram.fit(np.array([EOS, EOS], np.uint16), VOCAB, EOS)
