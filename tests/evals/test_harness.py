"""The harness adapter against direct computation, and whole tasks with models of known skill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from evals.adapter import HarnessModel
from evals.continuation import Lengths, Question, make_questions, write_questions
from evals.harness import read_samples, run_tasks
from model import HybridModel, ModelConfig

pytestmark = pytest.mark.slow

EOS = 256
MAX_LENGTH = 48


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, and the end of a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(["<|endoftext|>"])
    assert byte_level.token_to_id("<|endoftext|>") == EOS
    return byte_level


@pytest.fixture(scope="module")
def hybrid() -> HybridModel:
    config = ModelConfig(
        pattern="M-*",
        vocab_size=EOS + 1,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=2,
        num_kv_heads=1,
        attention_head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        mamba_state_size=8,
        mamba_num_groups=1,
        mamba_chunk_size=16,
        init_std=0.2,
    )
    return HybridModel(config).eval()


@pytest.fixture(scope="module")
def adapter(hybrid: HybridModel, tokenizer: Tokenizer) -> HarnessModel:
    return HarnessModel(hybrid, tokenizer, EOS, MAX_LENGTH, batch_size=3)


def requests(*arguments: tuple) -> list[Any]:
    return [SimpleNamespace(args=argument) for argument in arguments]


@torch.no_grad()
def direct(hybrid: HybridModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood by one unpadded forward pass, token by token."""
    sequence = context + continuation
    tokens = torch.tensor([sequence])
    log_probs = hybrid.logits(tokens, torch.zeros_like(tokens, dtype=torch.int32)).log_softmax(-1)
    places = range(len(context), len(sequence))
    nats = sum(log_probs[0, place - 1, sequence[place]].item() for place in places)
    return nats, all(log_probs[0, p - 1].argmax().item() == sequence[p] for p in places)


PAIRS = [
    ("the cat", " sat"),
    ("a", "b"),
    ("def f(x):\n", "    return x"),
    ("ü", "ß"),
    ("1 + 1 =", " 2"),
]


def test_loglikelihoods_equal_direct_computation(
    adapter: HarnessModel, hybrid: HybridModel
) -> None:
    results = adapter.loglikelihood(requests(*PAIRS))
    for (context, continuation), (nats, greedy) in zip(PAIRS, results, strict=True):
        moved = context[len(context.rstrip()) :]  # the harness scores trailing spaces with the rest
        context_ids = adapter.tok_encode(context.rstrip())
        expected = direct(hybrid, context_ids, adapter.tok_encode(moved + continuation))
        assert nats == pytest.approx(expected[0], rel=1e-5)
        assert greedy == expected[1]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_padding_and_batching_change_nothing(
    adapter: HarnessModel, hybrid: HybridModel, tokenizer: Tokenizer, batch_size: int
) -> None:
    other = HarnessModel(hybrid, tokenizer, EOS, MAX_LENGTH, batch_size)
    backwards = other.loglikelihood(requests(*reversed(PAIRS)))[::-1]
    for (nats, greedy), (expected, is_greedy) in zip(
        backwards, adapter.loglikelihood(requests(*PAIRS)), strict=True
    ):
        assert nats == pytest.approx(expected, rel=1e-5)
        assert greedy == is_greedy


def test_a_greedy_continuation_is_recognized(adapter: HarnessModel, hybrid: HybridModel) -> None:
    context = adapter.tok_encode("some text")
    greedy = hybrid.generate([context], 6, EOS)[0]
    wrong = [*greedy[:-1], (greedy[-1] + 1) % EOS]
    results = adapter._loglikelihood_tokens([(None, context, greedy), (None, context, wrong)])
    assert [is_greedy for _, is_greedy in results] == [True, False]


def test_long_contexts_lose_their_beginning(adapter: HarnessModel, hybrid: HybridModel) -> None:
    context, continuation = "abcdefgh" * 20, " the end"
    ids, scored = adapter.tok_encode(context), adapter.tok_encode(continuation)
    kept = ids[-(MAX_LENGTH - len(scored) + 1) :]
    (result,) = adapter.loglikelihood(requests((context, continuation)))
    assert result[0] == pytest.approx(direct(hybrid, kept, scored)[0], rel=1e-5)


def test_a_continuation_longer_than_the_model_is_refused(adapter: HarnessModel) -> None:
    with pytest.raises(ValueError, match="exceeds the 48"):
        adapter.loglikelihood(requests(("a", "b" * 49)))


def test_an_empty_context_is_the_end_of_the_document_before(
    adapter: HarnessModel, hybrid: HybridModel
) -> None:
    (result,) = adapter.loglikelihood(requests(("", "hello")))
    expected = direct(hybrid, [EOS], adapter.tok_encode("hello"))
    assert result[0] == pytest.approx(expected[0], rel=1e-5)


def test_rolling_scores_each_token_once(adapter: HarnessModel, hybrid: HybridModel) -> None:
    short, long = "a short text", "a long text of many words. " * 5
    rolled = adapter.loglikelihood_rolling(requests((short,), (long,)))
    assert rolled[0] == pytest.approx(direct(hybrid, [EOS], adapter.tok_encode(short))[0], rel=1e-5)
    ids = adapter.tok_encode(long)
    nats, done = 0.0, 0
    while done < len(ids):  # windows of MAX_LENGTH predictions, the last with full context
        end = min(done + MAX_LENGTH, len(ids))
        context = [EOS, *ids][end - MAX_LENGTH : done + 1]
        nats += direct(hybrid, context, ids[done:end])[0]
        done = end
    assert rolled[1] == pytest.approx(nats, rel=1e-5)


def test_generation_stops_at_stop_strings_and_limits(
    adapter: HarnessModel, hybrid: HybridModel
) -> None:
    greedy = adapter.tok_decode(hybrid.generate([adapter.tok_encode("once")], 20, EOS)[0])
    stop = greedy[5:7]
    texts = adapter.generate_until(
        requests(
            ("once", {"until": [], "max_gen_toks": 20}),
            ("once", {"until": [stop, "\n\n"], "max_gen_toks": 20}),
            ("once", {"until": "never", "max_gen_toks": 4}),
        )
    )
    limited = adapter.tok_decode(adapter.tok_encode(greedy)[:4])
    assert texts == [greedy, greedy[: greedy.index(stop)], limited]


def test_sampling_is_refused(adapter: HarnessModel) -> None:
    with pytest.raises(ValueError, match="do_sample"):
        adapter.generate_until(requests(("a", {"do_sample": True})))


class FakeModel(nn.Module):
    """Logits straight from `hidden`; the head does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, 1)
        self.head = nn.Identity()

    def hidden(self, tokens_BT: Tensor, seq_idx_BT: Tensor) -> Tensor:
        return torch.zeros(*tokens_BT.shape, EOS + 1)


class KnowsTheTexts(FakeModel):
    """Is sure of the next byte wherever the last ones occur in its texts."""

    SEEN = 40  # more than a line, so that the line number is among them

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.following = {
            tuple(text[end - self.SEEN : end]): text[end]
            for text in texts
            for end in range(self.SEEN, len(text))
        }

    def hidden(self, tokens_BT: Tensor, seq_idx_BT: Tensor) -> Tensor:
        logits = super().hidden(tokens_BT, seq_idx_BT)
        for row, tokens in enumerate(tokens_BT.tolist()):
            for end in range(self.SEEN, len(tokens) + 1):
                following = self.following.get(tuple(tokens[end - self.SEEN : end]))
                if following is not None:
                    logits[row, end - 1, following] = 20.0
        return logits


def corpus() -> dict[str, list[dict]]:
    def lines(name: str) -> str:
        return "\n".join(f"{name} {i}: {i * 7919 % 1000} < {i * i} \\ü{{x}}" for i in range(60))

    return {
        domain: [{"text": lines(f"{domain}{i}"), "reserved": False} for i in range(3)]
        for domain in ("code", "prose")
    }


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return make_questions(corpus(), 40, 0, Lengths(context=120, min_context=60, span=40))[0]


@pytest.fixture
def home_untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield
    assert list(home.iterdir()) == []


def run(model: Any, tokenizer: Tokenizer, questions: list[Question], folder: Path) -> dict:
    write_questions(questions, folder / "continuation.jsonl")
    return run_tasks(
        model,
        tokenizer,
        EOS,
        ["continuation"],
        folder,
        questions={"continuation": folder / "continuation.jsonl"},
        max_length=256,
    )["continuation"]


@pytest.mark.usefixtures("home_untouched")
def test_a_model_that_knows_the_texts_answers_everything(
    tokenizer: Tokenizer, questions: list[Question], tmp_path: Path
) -> None:
    texts = [tokenizer.encode(d["text"]).ids for ds in corpus().values() for d in ds]
    result = run(KnowsTheTexts(texts), tokenizer, questions, tmp_path)
    assert result["accuracy"] == 1.0
    assert (result["num_samples"], result["num_fewshot"]) == (40, 0)
    assert result["standard_error"] == 0.0
    assert result["metrics"]["acc"] == 1.0
    assert result["version"] == 2.0


def test_a_uniform_model_is_at_chance_with_its_standard_error(
    tokenizer: Tokenizer, questions: list[Question], tmp_path: Path
) -> None:
    ascii_only = [q for q in questions if all(len(c) == len(c.encode()) for c in q.choices)]
    balanced = ascii_only or questions
    result = run(FakeModel(), tokenizer, balanced, tmp_path)
    num, chance = result["num_samples"], 0.25
    assert abs(result["accuracy"] - chance) < 4 * math.sqrt(chance * (1 - chance) / num)
    share = result["accuracy"]
    assert result["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / (num - 1)))


def test_samples_hold_prompt_choices_scores_and_answer_unaltered(
    hybrid: HybridModel, tokenizer: Tokenizer, questions: list[Question], tmp_path: Path
) -> None:
    result = run(hybrid, tokenizer, questions, tmp_path)
    samples = read_samples(tmp_path / "continuation_samples.jsonl")
    assert len(samples) == len(questions)
    for sample, question in zip(samples, questions, strict=True):
        assert sample["prompt"] == question.context
        assert sample["continuations"] == list(question.choices)
        assert sample["document"]["domain"] == question.domain
        assert int(sample["target"]) == question.answer
        scores = [score[0] for score in sample["scores"]]
        assert sample["metrics"]["acc"] == float(scores.index(max(scores)) == question.answer)
        alone = [score[0] for score in sample["scores_without_prompt"]]
        gains = [score - base for score, base in zip(scores, alone, strict=True)]
        informed = float(gains.index(max(gains)) == question.answer)
        assert sample["metrics"]["acc_mutual_info"] == informed
    correct = [sample["metrics"]["acc_mutual_info"] for sample in samples]
    assert result["accuracy"] == pytest.approx(sum(correct) / len(correct))
    json.dumps(result)  # plain numbers throughout


def test_the_process_stays_offline_quiet_and_its_generators_untouched(
    capfd: pytest.CaptureFixture[str],
    tokenizer: Tokenizer,
    questions: list[Question],
    tmp_path: Path,
) -> None:
    model = FakeModel()
    state = torch.get_rng_state()
    run(model, tokenizer, questions[:4], tmp_path)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), state)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_an_unknown_task_names_those_that_exist(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    with pytest.raises(ValueError, match=r"knows no task contination.*continuation"):
        run_tasks(
            FakeModel(),  # type: ignore[arg-type]
            tokenizer,
            EOS,
            ["contination"],
            tmp_path,
            questions={"contination": file},
            max_length=64,
        )
