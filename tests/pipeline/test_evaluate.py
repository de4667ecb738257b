"""The eval stage on a small model and a corpus of three domains held in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from evals.domains import domain_loss
from model import HybridModel, ModelConfig
from pipeline.config import EvalsConfig
from pipeline.data.stream import validation_rows
from pipeline.evaluate import evaluate

pytestmark = pytest.mark.slow

EOS = 256
LENGTH = 128
CONFIG = EvalsConfig(num_questions=12, batch_size=8)


def lines(name: str, count: int = 40) -> str:
    return "\n".join(f"{name} line {i} holds {i * 7919 % 1000} of {i * i}" for i in range(count))


class FakeDataset:
    """What `evaluate` asks of `pipeline.data.shards.Dataset`, one token a byte."""

    eos_id = EOS
    vocab_size = EOS + 1
    dtype = np.dtype("<u2")

    def __init__(self, folder: Path, texts: dict[str, list[str]]) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>"])
        self.tokenizer_path = folder / "tokenizer.json"
        tokenizer.save(str(self.tokenizer_path))
        self.tokenizer = tokenizer
        self.texts = texts
        self.sources = tuple(texts)
        self.training = {name: self.encode([lines(f"{name} seen", 80)] * 20) for name in texts}

    def encode(self, texts: list[str]) -> np.ndarray:
        ids = [token for text in texts for token in [*self.tokenizer.encode(text).ids, EOS]]
        return np.array(ids, self.dtype)

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * EOS + [0])

    def holdout(self, source: str) -> np.ndarray:
        return self.encode(self.texts[source])

    def holdout_documents(self, source: str) -> list[dict[str, Any]]:
        return [{"text": text, "reserved": False} for text in self.texts[source]]

    def num_tokens(self, source: str) -> int:
        return len(self.training[source])

    def read(self, source: str, start: int, count: int) -> np.ndarray:
        return self.training[source][start : start + count]


def build(seed: int) -> HybridModel:
    config = ModelConfig(
        pattern="M*",
        vocab_size=EOS + 1,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=2,
        num_kv_heads=1,
        attention_head_dim=16,
        mamba_num_heads=2,
        mamba_head_dim=16,
        mamba_state_size=8,
        mamba_num_groups=1,
        mamba_chunk_size=32,
        init_std=0.3,
    )
    return HybridModel(config, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> FakeDataset:
    texts = {name: [lines(f"{name}{i}") for i in range(2)] for name in ("code", "prose", "sums")}
    return FakeDataset(folder, texts)


@pytest.fixture(scope="module")
def results(dataset: FakeDataset, folder: Path) -> dict[str, Any]:
    return run(dataset, folder / "step-10", CONFIG)


def run(dataset: Any, folder: Path, config: EvalsConfig, **settings: Any) -> dict[str, Any]:
    return evaluate(build(0), build(1), dataset, config, folder, LENGTH, 0, **settings)


def test_results_are_written_as_returned(results: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "step-10" / "results.json").read_text()) == results
    assert not list((folder / "step-10").glob("*.tmp"))


def test_every_held_out_token_but_the_first_of_a_document_counts(
    results: dict[str, Any], dataset: FakeDataset
) -> None:
    for name, domain in results["domains"].items():
        documents = dataset.texts[name]
        assert domain["tokens"] == len(dataset.holdout(name)) - len(documents)
        assert domain["bytes"] == sum(len(text.encode()) - 1 for text in documents)


def test_the_model_and_the_untrained_one_are_scored_on_the_same_rows(
    results: dict[str, Any], dataset: Any
) -> None:
    rows = validation_rows(dataset, "code", LENGTH, 1_000_000)
    ours, fresh = (domain_loss(build(seed), rows, dataset.token_bytes()) for seed in (0, 1))
    domain = results["domains"]["code"]
    assert domain["loss"] == pytest.approx(ours.loss)
    assert domain["bits_per_byte"] == pytest.approx(ours.bits_per_byte)
    assert domain["untrained_bits_per_byte"] == pytest.approx(fresh.bits_per_byte)


def test_baselines_know_the_domain_and_lie_in_their_order(results: dict[str, Any]) -> None:
    for domain in results["domains"].values():
        bits = [domain[f"{kind}_bits_per_byte"] for kind in ("bigram", "unigram", "untrained")]
        assert bits == sorted(bits)
        assert bits[0] < 0.8 * bits[1]


def test_baselines_do_not_change_with_the_evaluated_text(
    results: dict[str, Any], dataset: FakeDataset, folder: Path
) -> None:
    """Twice the same held-out text has the same bits per byte: nothing was learned from it."""
    doubled = FakeDataset(folder, {name: texts * 2 for name, texts in dataset.texts.items()})
    again = run(doubled, folder / "doubled", EvalsConfig(tasks=()))
    for name, domain in again["domains"].items():
        for kind in ("bigram", "unigram"):
            key = f"{kind}_bits_per_byte"
            assert domain[key] == pytest.approx(results["domains"][name][key])


def test_continuation_is_reported_in_all_and_by_domain(results: dict[str, Any]) -> None:
    task = results["tasks"]["continuation"]
    assert (task["num_samples"], task["chance"], task["num_fewshot"]) == (12, 0.25, 0)
    parts = task["per_domain"]
    assert {name: part["num_samples"] for name, part in parts.items()} == {
        "code": 4,
        "prose": 4,
        "sums": 4,
    }
    mean = sum(part["accuracy"] for part in parts.values()) / 3
    assert task["accuracy"] == pytest.approx(mean)
    assert task["too_short"] == {"code": 0, "prose": 0, "sums": 0}
    assert 0 < task["standard_error"] < 0.2


def test_questions_and_samples_stay_in_the_folder(results: dict[str, Any], folder: Path) -> None:
    for name in ("continuation.jsonl", "continuation_samples.jsonl"):
        assert len((folder / "step-10" / name).read_text().splitlines()) == 12


def test_tasks_can_be_left_out_and_progress_is_told(dataset: FakeDataset, tmp_path: Path) -> None:
    told: list[str] = []
    results = run(dataset, tmp_path, EvalsConfig(tasks=()), progress=told.append)
    assert results["tasks"] == {}
    assert [line.split(":")[0] for line in told] == ["code", "prose", "sums"]


def test_a_domain_without_held_out_text_is_left_out_and_named(
    dataset: FakeDataset, tmp_path: Path
) -> None:
    told: list[str] = []
    empty = FakeDataset(tmp_path, dataset.texts | {"prose": []})
    results = run(empty, tmp_path / "eval", EvalsConfig(tasks=()), progress=told.append)
    assert set(results["domains"]) == {"code", "sums"}
    assert "prose: nothing is held out, so nothing is measured" in told


def test_held_out_text_too_short_for_questions_leaves_the_task_out(tmp_path: Path) -> None:
    told: list[str] = []
    short = FakeDataset(tmp_path, {"code": ["a = 1\n"]})
    results = run(short, tmp_path / "eval", CONFIG, progress=told.append)
    assert results["tasks"] == {}
    assert "too short" in told[-1]


def test_the_harness_is_imported_only_when_a_task_runs() -> None:
    check = "import sys, pipeline.evaluate; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
