"""The same numbers as the public harness's own model on our export, task by task.

A small hybrid is trained for a moment, exported, and evaluated twice: by our class on our weights,
and by the harness's `hf` model on the exported folder in FP32, on the same tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from evals.adapter import HarnessModel, Local
from evals.lm import Hybrid
from evals.scoring import Scorer
from evals.tokenizers import Plain
from model import HybridModel, document_index
from model.hf import config_to_nemotron_h, to_nemotron_h

from .models import small_hybrid

pytestmark = pytest.mark.slow

EOS_TOKEN = "<|endoftext|>"
MAX_LENGTH = 160
TEXT = "\n".join(topics[name] for name in sorted(topics))
SENTENCES = [s.replace("\n", " ").strip() + "." for s in TEXT.split(". ") if 60 < len(s) < 240]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT[:200_000]],
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=[EOS_TOKEN],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return bpe


@pytest.fixture(scope="module")
def trained(tokenizer: Tokenizer) -> HybridModel:
    torch.manual_seed(0)
    hybrid = small_hybrid("M-*-", vocab_size=512).train()
    ids = torch.tensor(tokenizer.encode(TEXT[:60_000]).ids)
    rows_BT = ids[: len(ids) // 65 * 65].view(-1, 65)
    optimizer = torch.optim.AdamW(hybrid.parameters(), lr=3e-3)
    for step in range(60):
        batch = rows_BT[torch.arange(step * 8, step * 8 + 8) % len(rows_BT)]
        tokens_BT, labels_BT = batch[:, :-1], batch[:, 1:]
        loss, count = hybrid.loss(tokens_BT, labels_BT, document_index(tokens_BT, -1))
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hybrid.eval()


@pytest.fixture(scope="module")
def ours(trained: HybridModel, tokenizer: Tokenizer) -> HarnessModel:
    plain, eos = Plain(tokenizer), tokenizer.token_to_id(EOS_TOKEN)
    return HarnessModel(Local(Scorer(Hybrid(trained), plain, eos)), plain, eos, MAX_LENGTH, 5)


@pytest.fixture(scope="module")
def theirs(
    trained: HybridModel, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The harness's own model, a batch of one: nothing is padded."""
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("export")
    eos = tokenizer.token_to_id(EOS_TOKEN)
    values = config_to_nemotron_h(trained.config, eos_token_id=eos, pad_token_id=eos)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = to_nemotron_h(trained.state_dict(), trained.config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=MAX_LENGTH
    )


# ---- Tasks --------------------------------------------------------------------------------------

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True}
                    for m in ("acc", "acc_norm")],
}  # fmt: skip


def cut(sentence: str, at: int) -> tuple[str, str]:
    """Before and after a word's end near `at`, the space left to neither."""
    place = sentence.index(" ", at)
    return sentence[:place], sentence[place + 1 :]


def choices() -> list[dict]:
    """Endings of four sentences; the right one in turn."""
    documents = []
    for number, sentence in enumerate(SENTENCES[:24]):
        context, ending = cut(sentence, 25)
        wrong = [cut(SENTENCES[100 + 3 * number + i], 20)[1] for i in range(3)]
        gold = number % 4
        documents.append(
            {"context": context, "choices": [*wrong[:gold], ending, *wrong[gold:]], "gold": gold}
        )
    return documents


def sharing_prefixes() -> list[dict]:
    """Answers one of which begins another; a context that ends in spaces; none at all."""
    documents = []
    for number, sentence in enumerate(SENTENCES[:12]):
        context, ending = cut(sentence, 30)
        words = ending.split()
        spans = [" ".join(words[:count]) for count in (1, 2, 3)] + [words[0][:2]]
        padded = context + "  " if number % 3 == 1 else "" if number % 3 == 2 else context
        documents.append({"context": padded, "choices": spans, "gold": number % 4})
    return documents


def splitting_words() -> list[dict]:
    """The border of context and answer lies within a word, most often within a token."""
    return [
        {
            "context": sentence[: at + 2],
            "choices": [sentence[at + 2 : at + 20], "xyz", "the", "ing a"],
            "gold": 0,
        }
        for sentence in SENTENCES[30:50]
        for at in [sentence.index(" ", 20)]
        if len(sentence) > at + 20
    ]


def long_contexts() -> list[dict]:
    """Contexts of several times the model's length."""
    return [
        {
            "context": " ".join(SENTENCES[k : k + 12]),
            "choices": [cut(SENTENCES[k + 12], 5)[0], SENTENCES[k + 13][:60], "No.", "Yes."],
            "gold": 0,
        }
        for k in range(0, 80, 10)
    ]


def beginnings() -> list[dict]:
    """WinoGrande's form: which of two beginnings fits the ending.

    Sentences of their own: where the harness's cache of answers finds one text cut at two places
    (here and in `choices`), it scores the shorter answer with the logits of other positions.
    """
    return [
        {"options": [one[:40], other[:40]], "ending": cut(one, 40)[1], "gold": 0}
        for one, other in zip(SENTENCES[200:216], SENTENCES[216:232], strict=True)
    ]


def last_words() -> list[dict]:
    return [
        {"context": sentence.rsplit(" ", 1)[0], "continuation": sentence.rsplit(" ", 1)[1]}
        for sentence in SENTENCES[50:80]
    ]


def texts() -> list[dict]:
    return [{"text": " ".join(SENTENCES[k : k + 1 + k % 9])} for k in range(12)]


TASKS: dict[str, tuple[list[dict], dict]] = {
    "choices": (choices(), CHOICE),
    "shots": (choices(), CHOICE | {"num_fewshot": 1, "fewshot_split": "test"}),
    "sharing_prefixes": (sharing_prefixes(), CHOICE | {"target_delimiter": " "}),
    "splitting_words": (splitting_words(), CHOICE | {"target_delimiter": ""}),
    "long_contexts": (long_contexts(), CHOICE),
    "beginnings": (
        beginnings(),
        CHOICE | {"doc_to_text": "gold", "doc_to_choice": "options", "doc_to_target": "ending"},
    ),
    "lambada": (
        last_words(),
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{' ' + continuation}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            ],
        },
    ),
    "rolling": (
        texts(),
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [
                {"metric": name, "aggregation": aggregation, "higher_is_better": False}
                for name, aggregation in (
                    ("word_perplexity", "weighted_perplexity"),
                    ("byte_perplexity", "weighted_perplexity"),
                    ("bits_per_byte", "bits_per_byte"),
                )
            ],
        },
    ),
    "generation": (
        [{"question": s[:50], "answer": s[50:60]} for s in SENTENCES[:12]],
        {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {
                "until": ["\n", " the", ". "], "max_gen_toks": 24, "do_sample": False,
            },
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def specifications(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict]]:
    """Each task as the harness takes it, over a local file."""
    folder = tmp_path_factory.mktemp("tasks")
    found = []
    for name, (documents, settings) in TASKS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(document) for document in documents))
        data = {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")}
        found.append(
            {"task": name, "dataset_path": "json", "test_split": "test", "dataset_kwargs": data,
             "metadata": {"version": 1.0}, **settings}
        )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield found


@pytest.fixture(scope="module")
def both(ours: HarnessModel, theirs: Any, specifications: list[dict]) -> tuple[Any, Any]:
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    def results(model: Any) -> Any:
        loaded = TaskManager(include_defaults=False).load(specifications)
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(1)
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
        return evaluator.evaluate(model, loaded, bootstrap_iters=0)

    return results(ours), results(theirs)


@pytest.mark.parametrize("task", list(TASKS))
def test_every_metric_of_a_task_is_the_harnesss_own(both: tuple[Any, Any], task: str) -> None:
    mine, public = (
        {
            key: value
            for key, value in results["results"][task].items()
            if "," in key and "stderr" not in key
        }
        for results in both
    )
    assert mine.keys() == public.keys()
    assert mine
    for key, value in public.items():
        if key.startswith(("acc", "exact_match")):
            assert mine[key] == value, key
        else:
            assert mine[key] == pytest.approx(value, rel=1e-3), key


@pytest.mark.parametrize("task", list(TASKS))
def test_every_response_is_the_harnesss_own(both: tuple[Any, Any], task: str) -> None:
    """Log-likelihoods within 1e-3, greedy flags and generated texts exactly."""
    mine, public = (
        [response for sample in results["samples"][task] for response in sample["filtered_resps"]]
        for results in both
    )
    assert len(mine) == len(public) > 0
    for one, other in zip(mine, public, strict=True):
        if isinstance(other, tuple | list):
            assert one[0] == pytest.approx(other[0], abs=1e-3)
            assert one[1] == other[1]
        elif isinstance(other, float):
            assert one == pytest.approx(other, abs=1e-3)
        else:
            assert one == other


def test_the_tasks_hold_the_cases_that_they_are_named_for(
    ours: HarnessModel, tokenizer: Tokenizer
) -> None:
    """Otherwise the comparison above would say less than it seems to."""
    split = [
        document
        for document in splitting_words()
        if tokenizer.encode(document["context"] + document["choices"][0]).ids[
            : len(tokenizer.encode(document["context"]).ids)
        ]
        != tokenizer.encode(document["context"]).ids
    ]
    assert len(split) > 3
    assert all(len(tokenizer.encode(d["context"]).ids) > 2 * MAX_LENGTH for d in long_contexts())
    assert any(len(tokenizer.encode(d["text"]).ids) > 2 * MAX_LENGTH for d in texts())
    assert any(d["context"] == "" for d in sharing_prefixes())


def test_a_context_of_spaces_alone_has_a_score(ours: HarnessModel) -> None:
    """The harness's own model stops there; ours scores the spaces with the rest."""
    spaced, plain = ours.loglikelihood(
        [SimpleNamespace(args=(" ", "a")), SimpleNamespace(args=("", " a"))]  # type: ignore[list-item]
    )
    assert spaced == plain
