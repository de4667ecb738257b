"""The harness adapter against direct computation, and whole tasks with models of known skill."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from evals import harness
from evals.adapter import HarnessModel, Local
from evals.continuation import Lengths, Question, make_questions, write_questions
from evals.harness import Subject, clustered_error, read_samples, run_task
from evals.lm import Hybrid, LanguageModel
from evals.registry import Files, Registry, check_names
from evals.scoring import Scorer
from evals.tokenizers import Plain
from model import HybridModel

from .models import EOS, KnowsTheTexts, Uniform, byte_tokenizer, small_hybrid

pytestmark = pytest.mark.slow

MAX_LENGTH = 48


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def hybrid() -> HybridModel:
    return small_hybrid()


def adapt(hybrid: HybridModel, tokenizer: Tokenizer, batch_size: int = 3) -> HarnessModel:
    plain = Plain(tokenizer)
    workers = Local(Scorer(Hybrid(hybrid), plain, EOS))
    return HarnessModel(workers, plain, EOS, MAX_LENGTH, batch_size)


@pytest.fixture(scope="module")
def adapter(hybrid: HybridModel, tokenizer: Tokenizer) -> HarnessModel:
    return adapt(hybrid, tokenizer)


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


def test_a_text_begins_as_documents_do_where_they_begin_with_a_token(
    hybrid: HybridModel, tokenizer: Tokenizer
) -> None:
    begins = 7
    plain = Plain(tokenizer, begins)
    workers = Local(Scorer(Hybrid(hybrid), plain, EOS))
    model = HarnessModel(workers, plain, EOS, MAX_LENGTH, 3, prefix_id=begins)
    cat, sat = (tokenizer.encode(text).ids for text in ("the cat", " sat"))
    assert model.loglikelihood(requests(("the cat", " sat")))[0][0] == pytest.approx(
        direct(hybrid, [begins, *cat], sat)[0], rel=1e-4
    )
    alone = direct(hybrid, [begins], cat)[0]
    assert model.loglikelihood(requests(("", "the cat")))[0][0] == pytest.approx(alone, rel=1e-4)
    assert model.loglikelihood_rolling(requests(("the cat",)))[0] == pytest.approx(alone, rel=1e-4)


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
    other = adapt(hybrid, tokenizer, batch_size)
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
    asked = [
        SimpleNamespace(request_type=kind, args=args)
        for kind, args in (
            ("loglikelihood", (context, continuation)),
            ("loglikelihood", ("a" * (MAX_LENGTH - 7), continuation)),
            ("generate_until", ("a" * 30, {"max_gen_toks": 19})),
            ("generate_until", ("a" * 30, {"max_gen_toks": 18})),
            ("loglikelihood_rolling", (context,)),
        )
    ]
    cut = [adapter.truncates(request) for request in asked]  # type: ignore[arg-type]
    assert cut == [True, False, True, False, False]


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


def run(lm: LanguageModel, tokenizer: Tokenizer, questions: list[Question], folder: Path) -> dict:
    write_questions(questions, folder / "continuation.jsonl")
    files = Files(of_task={"continuation": folder / "continuation.jsonl"})
    subject = Subject(lm, Plain(tokenizer), EOS, max_length=256)
    return run_task(subject, "continuation", Registry(["continuation"], {}), folder, files)


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
    assert result["version"] == 3.0


def test_a_uniform_model_is_at_chance_with_its_standard_error(
    tokenizer: Tokenizer, questions: list[Question], tmp_path: Path
) -> None:
    ascii_only = [q for q in questions if all(len(c) == len(c.encode()) for c in q.choices)]
    balanced = ascii_only or questions
    result = run(Uniform(), tokenizer, balanced, tmp_path)
    num, chance = result["num_samples"], 0.25
    assert abs(result["accuracy"] - chance) < 4 * math.sqrt(chance * (1 - chance) / num)
    assert result["chance"] == chance
    samples = read_samples(tmp_path / "continuation_samples.jsonl")
    right = [sample["metrics"]["acc_mutual_info"] for sample in samples]
    documents = [(s["document"]["domain"], s["document"]["document"]) for s in samples]
    assert result["standard_error"] == pytest.approx(clustered_error(right, documents))


def test_samples_hold_prompt_choices_scores_and_answer_unaltered(
    hybrid: HybridModel, tokenizer: Tokenizer, questions: list[Question], tmp_path: Path
) -> None:
    result = run(Hybrid(hybrid), tokenizer, questions, tmp_path)
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


def test_the_process_stays_quiet_and_its_generators_untouched(
    capfd: pytest.CaptureFixture[str],
    tokenizer: Tokenizer,
    questions: list[Question],
    tmp_path: Path,
) -> None:
    model = Uniform()
    state = torch.get_rng_state()
    run(model, tokenizer, questions[:4], tmp_path)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_may_hold_every_kind_of_line_end(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\re\x0cf\n"
    document = {"arguments": [[text, " x"]], "doc": {"text": text}, "metrics": ["acc"], "acc": 1.0}
    document |= {"filtered_resps": [(-1.0, True)], "target": 0}
    harness._write_samples([document, document], tmp_path / "t_samples.jsonl")
    read = read_samples(tmp_path / "t_samples.jsonl")
    assert [sample["prompt"] for sample in read] == [text, text]


def test_an_unknown_task_is_refused_at_once_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"knows no task contination; did you mean continuation"):
        check_names(["contination"])
    with pytest.raises(ValueError, match=r"hellaswagg; did you mean hellaswag"):
        check_names(["hellaswagg", "hellaswag", "mgsm_cot_native"])


def test_the_score_without_a_context_never_follows_the_end_of_a_document(
    hybrid: HybridModel, tokenizer: Tokenizer, questions: list[Question], tmp_path: Path
) -> None:
    """Each choice's own likelihood is taken after the context's last visible character."""
    run(Hybrid(hybrid), tokenizer, questions[:1], tmp_path)
    (sample,) = read_samples(tmp_path / "continuation_samples.jsonl")
    context = questions[0].context
    ending = context.rstrip()[-1]
    border = context[len(context.rstrip()) :]
    for choice, (nats, _) in zip(
        questions[0].choices, sample["scores_without_prompt"], strict=True
    ):
        ids = (tokenizer.encode(text).ids for text in (ending, border + choice))
        assert nats == pytest.approx(direct(hybrid, *ids)[0], rel=1e-4)


def test_questions_of_one_document_are_no_independent_draws() -> None:
    values = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    alone = clustered_error(values, range(8))
    assert alone == pytest.approx(np.std(values, ddof=1) / math.sqrt(8))
    by_document = clustered_error(values, ["a", "a", "a", "b", "b", "b", "c", "d"])
    assert by_document == pytest.approx(math.sqrt((1.5**2 + 1.5**2 + 0.5) * 4 / 3) / 8)
    assert by_document > 1.5 * alone
    assert clustered_error([1.0, 0.0], ["a", "a"]) == 0.0  # one document: no error can be given
