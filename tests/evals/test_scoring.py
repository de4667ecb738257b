"""Batches: every request once, contexts computed once, the same numbers however they are cut."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from evals.lm import Hybrid
from evals.scoring import Scorer, plan_batches, score_groups
from model.generate import GenerationState

from .models import EOS, small_hybrid

CONTEXTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], list(range(40, 60)), [3] * 30, [5, 6]]


def requests() -> list[tuple[list[int], list[int]]]:
    """Four answers to each context, of several lengths, some of which begin others; one alone."""
    generator = random.Random(0)
    pairs = []
    for context in CONTEXTS:
        answer = [generator.randrange(EOS) for _ in range(6)]
        pairs += [(context, answer[:n]) for n in (1, 3, 6)] + [(context, [9, 9, 9])]
    pairs.append((list(range(80, 120)), [1, 2, 3]))
    generator.shuffle(pairs)
    return pairs


class Counting(Hybrid):
    """Counts the tokens that pass through the model."""

    def __init__(self) -> None:
        super().__init__(small_hybrid())
        self.context_rows: list[tuple[int, ...]] = []
        self.whole_rows = 0

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        self.whole_rows += len(tokens_BT)
        return super().hidden(tokens_BT)

    def prefill(self, prompts, room: int) -> tuple[Tensor, GenerationState]:  # type: ignore[no-untyped-def]
        self.context_rows += [tuple(prompt) for prompt in prompts]
        return super().prefill(prompts, room)


def score(lm: Hybrid, batch_size: int, share: bool) -> list[tuple[float, bool]]:
    pairs = requests()
    results: dict[int, tuple[float, bool]] = {}
    for batch in plan_batches(pairs, batch_size, share=share):
        places = [place for group in batch for place in group.places]
        results |= dict(zip(places, score_groups(lm, batch), strict=True))
    return [results[place] for place in range(len(pairs))]


@pytest.mark.parametrize("batch_size", [1, 3, 5, 64])
@pytest.mark.parametrize("share", [True, False])
def test_each_request_is_in_one_batch_and_batches_are_no_larger_than_asked(
    batch_size: int, share: bool
) -> None:
    batches = plan_batches(requests(), batch_size, share=share)
    places = [place for batch in batches for group in batch for place in group.places]
    assert sorted(places) == list(range(len(requests())))
    assert all(sum(len(group.places) for group in batch) <= batch_size for batch in batches)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_sharing_a_context_changes_no_score(batch_size: int) -> None:
    alone = score(Hybrid(small_hybrid()), 1, False)
    shared = score(Hybrid(small_hybrid()), batch_size, True)
    for (nats, greedy), (expected, is_greedy) in zip(shared, alone, strict=True):
        assert nats == pytest.approx(expected, abs=1e-4)
        assert greedy == is_greedy


def test_the_context_of_a_question_is_computed_once() -> None:
    lm = Counting()
    score(lm, 64, True)
    long = [tuple(context) for context in CONTEXTS if len(context) >= 8]
    assert sorted(lm.context_rows) == sorted(long)
    assert lm.whole_rows == 4 + 1  # the short context's answers, and the question with one


def test_a_plan_is_the_requests_alone() -> None:
    """What several workers would share out: the same batches each time."""
    assert plan_batches(requests(), 4, share=True) == plan_batches(requests(), 4, share=True)


def test_large_heads_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(Hybrid(small_hybrid()), 64, True)
    monkeypatch.setattr("evals.scoring.HEAD_ELEMENTS", 2 * (EOS + 1))
    parts = score(Hybrid(small_hybrid()), 64, True)
    assert [s for s, _ in parts] == pytest.approx([s for s, _ in whole], abs=1e-5)


def test_a_stop_string_across_tokens_is_found_in_long_outputs() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    scorer = Scorer(Hybrid(small_hybrid()), Bytes(), EOS)
    from evals.scoring import Prompts

    stop = scorer._stop(Prompts(((1,),), 500, ("Ende ü",)))
    output = list(("x" * 300).encode()) + list("Ende ü".encode())
    assert not stop(0, output[:-1])
    assert stop(0, output)
    assert torch.is_grad_enabled()
