"""Generation with caches is the full forward pass, one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model import HybridModel, ModelConfig
from model.generate import left_pad

Build = Callable[..., ModelConfig]
PROMPTS = [[5, 9, 3, 3, 8, 40, 41], [7], [12, 13, 14]]
NO_EOS = -1


def fresh(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([tokens]), torch.zeros(1, len(tokens), dtype=torch.int32)


@pytest.fixture(params=[None, 100.0], ids=["no positions", "rotary"])
def model(request: pytest.FixtureRequest, small_config: Build) -> HybridModel:
    return HybridModel(small_config(rope_theta=request.param, init_std=0.2))


def test_cached_steps_equal_the_full_forward_batched_and_left_padded(model: HybridModel) -> None:
    tokens, seq_idx = left_pad(PROMPTS, torch.device("cpu"))
    logits, state = model.prefill(tokens, seq_idx, max_new_tokens=12)
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(12):
        for row, mine in zip(rows, logits, strict=True):
            expected = model.logits(*fresh(row))[0, -1]
            torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
        chosen = torch.randint(0, 101, (3,))
        for row, token in zip(rows, chosen.tolist(), strict=True):
            row.append(token)
        logits = model.step(chosen, state)


def test_greedy_takes_the_best_token_each_time(model: HybridModel) -> None:
    generated = model.generate(PROMPTS, max_new_tokens=6, eos_id=NO_EOS)
    for prompt, continuation in zip(PROMPTS, generated, strict=True):
        row = list(prompt)
        for token in continuation:
            assert model.logits(*fresh(row))[0, -1].argmax() == token
            row.append(token)
        assert len(continuation) == 6


def test_a_row_ends_at_eos_or_when_asked(model: HybridModel) -> None:
    free = model.generate(PROMPTS, max_new_tokens=6, eos_id=NO_EOS)
    eos = free[0][2]
    ended = model.generate(PROMPTS, max_new_tokens=6, eos_id=eos)
    assert ended == [row[: row.index(eos)] if eos in row else row for row in free]
    asked = model.generate(
        PROMPTS, 6, NO_EOS, should_stop=lambda row, new: row == 1 and len(new) == 2
    )
    assert asked == [free[0], free[1][:2], free[2]]


def test_sampling_repeats_for_a_seed_and_differs_for_another(model: HybridModel) -> None:
    def sample(seed: int) -> list[list[int]]:
        return model.generate(PROMPTS, 8, NO_EOS, temperature=1.0, top_p=0.9, seed=seed)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_top_p_keeps_the_smallest_set_that_reaches_it(model: HybridModel) -> None:
    probs = model.logits(*fresh(PROMPTS[0]))[0, -1].softmax(-1)
    ranked = probs.sort(descending=True)
    kept = set(ranked.indices[: int((ranked.values.cumsum(0) < 0.3).sum()) + 1].tolist())
    drawn = {
        model.generate(PROMPTS[:1], 1, NO_EOS, temperature=1.0, top_p=0.3, seed=seed)[0][0]
        for seed in range(60)
    }
    assert drawn <= kept
    assert len(drawn) > 1
    tiny = model.generate(PROMPTS[:1], 1, NO_EOS, temperature=1.0, top_p=1e-6)
    assert tiny == model.generate(PROMPTS[:1], 1, NO_EOS)


def test_settings_out_of_range_are_refused(model: HybridModel) -> None:
    with pytest.raises(ValueError, match="every prompt"):
        model.generate([[1], []], 4, NO_EOS)
    for settings in ({"temperature": -1.0}, {"top_p": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            model.generate(PROMPTS, 4, NO_EOS, **settings)
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(PROMPTS, 0, NO_EOS)


def test_tokens_fed_at_once_equal_the_full_forward_from_a_shared_state(model: HybridModel) -> None:
    """Several continuations of each prompt, from one prefill: as if each was read in one go."""
    continuations = [[1, 2, 3, 4, 5, 6, 7], [9], [30, 31], [8, 8, 8, 8]]
    of_prompt = [0, 0, 1, 2]
    tokens, seq_idx = left_pad(PROMPTS, torch.device("cpu"))
    _, state = model.prefill(tokens, seq_idx, max_new_tokens=8)
    padded = torch.zeros(4, 7, dtype=torch.int64)
    for row, continuation in enumerate(continuations):
        padded[row, : len(continuation)] = torch.tensor(continuation)
    chosen = state.select(torch.tensor(of_prompt))
    hidden = model.extend(padded, chosen)
    again = model.extend(padded, state.select(torch.tensor(of_prompt)))  # the state still stands
    assert torch.equal(hidden, again)
    for row, (prompt, continuation) in enumerate(zip(of_prompt, continuations, strict=True)):
        whole = model.logits(*fresh([*PROMPTS[prompt], *continuation]))[0, -len(continuation) :]
        mine = model.head(hidden[row, : len(continuation)]).float()
        torch.testing.assert_close(mine, whole, atol=1e-4, rtol=1e-4)
    longest = model.step(torch.tensor([50, 0, 0, 0]), chosen)[0]
    whole = model.logits(*fresh([*PROMPTS[0], *continuations[0], 50]))[0, -1]
    torch.testing.assert_close(longest, whole, atol=1e-4, rtol=1e-4)
