"""Measuring: the eval stage on a small model and a corpus of three domains held in memory."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from evals.domains import domain_loss
from evals.harness import Subject
from evals.lm import Hybrid
from evals.registry import TaskSettings, TaskUnavailableError
from evals.tokenizers import Plain
from model import HybridModel, ModelConfig
from pipeline.config import ConfigError, EvalsConfig, IncompleteError
from pipeline.data.blocks import DamagedShardError
from pipeline.data.shards import Dataset
from pipeline.data.stream import validation_rows
from pipeline.evaluation.command import refuse_incomplete
from pipeline.evaluation.measure import Measured, _fit_bigram, _measured_before, measure
from tests.data.corpora import document, write_corpus

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

    def read_intact(self, source: str, count: int) -> tuple[np.ndarray, list[Any]]:
        return self.training[source][:count], []


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


def run(
    dataset: Any, folder: Path, config: EvalsConfig, identity: str = "a", **settings: Any
) -> dict[str, Any]:
    lm = Hybrid(build(0))
    subject = Subject(lm, Plain(dataset.tokenizer), EOS, LENGTH, config.batch_size)
    measured = Measured(subject, identity, dataset, lm.model, build(1))
    return measure(measured, config, folder, LENGTH, 0, **settings)


def test_the_baselines_go_without_a_damaged_shard_only_where_that_is_configured(
    tmp_path: Path,
) -> None:
    documents = [document(7 * i, 30 + i % 9) for i in range(60)]
    corpus = write_corpus(tmp_path / "corpus", {"code": documents}, documents_per_shard=20)
    dataset, said = Dataset.open(corpus), list[str]()
    whole = _fit_bigram(dataset, "code", False, said.append)
    shard = corpus / "code-00000.tokens"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    with pytest.raises(DamagedShardError, match=r"code-00000\.tokens.*on_corrupt=skip"):
        _fit_bigram(dataset, "code", False, said.append)
    assert said == []
    rest = _fit_bigram(dataset, "code", True, said.append)
    assert said == ["code: the baselines go without code-00000.tokens, which is damaged"]
    assert (
        whole.counts.counts.sum() - rest.counts.counts.sum() == sum(map(len, documents[:20])) - 20
    )
    for path in corpus.glob("code-*.tokens"):
        path.unlink()
    with pytest.raises(DamagedShardError):
        _fit_bigram(dataset, "code", True, said.append)


def test_results_are_written_as_returned(results: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "step-10" / "results.json").read_text()) == results
    assert not list((folder / "step-10").glob(".*.partial"))


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
    assert "too short" in results["skipped"]["continuation"]


class Refuses(Hybrid):
    """A model that must not be asked."""

    def hidden(self, tokens_BT: Any) -> Any:
        raise AssertionError("computed again")

    prefill = hidden


def remeasure(dataset: Any, folder: Path, config: EvalsConfig, identity: str) -> dict[str, Any]:
    subject = Subject(Refuses(build(0)), Plain(dataset.tokenizer), EOS, LENGTH, config.batch_size)
    return measure(Measured(subject, identity, dataset, build(0), build(1)), config, folder, 128, 0)


def test_a_finished_result_is_not_computed_again_unless_something_differs(
    dataset: FakeDataset, tmp_path: Path
) -> None:
    first = run(dataset, tmp_path, CONFIG)
    assert remeasure(dataset, tmp_path, CONFIG, "a") == first
    changes: list[tuple[str, EvalsConfig]] = [
        ("other weights", CONFIG),
        ("a", dataclasses.replace(CONFIG, limit=3)),
        ("a", dataclasses.replace(CONFIG, num_questions=9)),
        ("a", dataclasses.replace(CONFIG, again=True)),
        ("a", dataclasses.replace(CONFIG, details={"continuation": TaskSettings(metric="acc")})),
    ]
    for identity, config in changes:
        with pytest.raises(AssertionError, match="computed again"):
            remeasure(dataset, tmp_path, config, identity)


class Dies(Hybrid):
    """A model that is killed after some batches."""

    def __init__(self, model: HybridModel, batches: int) -> None:
        super().__init__(model)
        self.left = batches
        self.rows = 0

    def prefill(self, prompts: Any, room: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.rows += len(prompts)
        return super().prefill(prompts, room)


def test_results_under_other_limits_do_not_stay_in_the_table(
    dataset: FakeDataset, tmp_path: Path
) -> None:
    of = {"limit": None, "max_length": 64}
    file = tmp_path / "results.json"
    tasks = {"same": {"score": 0.5, **of}, "fewer": {"score": 1.0, **of, "limit": 5}, "old": {}}
    file.write_text(json.dumps({"identity": "mine", "tasks": tasks}))
    assert list(_measured_before(file, "mine", of)) == ["same"]
    assert _measured_before(file, "another's", of) == {}


def test_an_interrupted_task_goes_on_where_it_stopped(dataset: FakeDataset, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, batch_size=8)

    def attempt(batches: int) -> tuple[Dies, dict[str, Any] | None]:
        lm = Dies(build(0), batches)
        subject = Subject(lm, Plain(dataset.tokenizer), EOS, LENGTH, config.batch_size)
        measured = Measured(subject, "a", dataset, build(0), build(1))
        try:
            return lm, measure(measured, config, tmp_path, LENGTH, 0)
        except KeyboardInterrupt:
            return lm, None

    whole = run(dataset, tmp_path / "other", config)
    killed, nothing = attempt(2)
    assert nothing is None
    going_on, results = attempt(1000)
    assert results is not None
    assert killed.rows + going_on.rows == 12  # each question's context once in all
    assert killed.rows > 0
    assert results["tasks"] == whole["tasks"]
    assert not list(tmp_path.glob(".*.db"))


def test_a_task_whose_data_cannot_be_had_is_named_with_the_reason(
    dataset: FakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Any, name: str, files: Any, cache: str) -> Any:
        raise TaskUnavailableError("ConnectionError: the hub is away")

    monkeypatch.setattr("evals.registry.Registry.build", gone)
    config = dataclasses.replace(CONFIG, tasks=("piqa",))
    results = run(dataset, tmp_path, config)
    assert results["skipped"] == {"piqa": "ConnectionError: the hub is away"}
    with pytest.raises(IncompleteError, match=r"piqa \(ConnectionError: the hub is away\)"):
        refuse_incomplete(results)
    with pytest.raises(ConfigError, match="piqa: ConnectionError"):
        run(dataset, tmp_path, dataclasses.replace(config, on_missing="fail"))


def test_model_code_is_run_only_where_it_is_allowed(dataset: FakeDataset, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tasks=("humaneval_plus",))
    results = run(dataset, tmp_path, config)
    assert "evals.allow_code=true" in results["skipped"]["humaneval_plus"]
    refuse_incomplete(results)  # it was never asked for


def test_local_tasks_say_what_they_are(dataset: FakeDataset, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    piqa = [{"query": f"Question: {i}?\n", "choices": ["a b", "c"], "gold": 0} for i in range(6)]
    (files / "piqa.jsonl").write_text("\n".join(map(json.dumps, piqa)))
    config = EvalsConfig(tasks=("local_piqa",), files=str(files), limit=5)
    task = run(dataset, tmp_path / "eval", config)["tasks"]["local_piqa"]
    assert task["label"] == "PIQA, validation questions of a local file"
    assert (task["metric"], task["chance"], task["num_samples"]) == ("acc_norm", 0.5, 5)
    assert (task["version"], task["num_fewshot"], task["truncated"]) == (1.0, 0, 0)
    assert task["standard_error"] >= 0
    with pytest.raises(ConfigError, match="which is not there"):
        run(dataset, tmp_path, dataclasses.replace(config, tasks=("local_arc_easy",)))
    with pytest.raises(ConfigError, match=r"evals\.files=<folder>"):
        run(dataset, tmp_path, dataclasses.replace(config, files=None))


def test_text_and_packed_rows_give_one_loss(
    dataset: FakeDataset, results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another tokenizer reads the held-out text, without documents that are reserved for
    questions; with ours, windows of a document are those of a row that it fills."""
    held_out = dataset.holdout_documents
    reserved = {"text": lines("kept apart"), "reserved": True}
    monkeypatch.setattr(dataset, "holdout_documents", lambda name: [*held_out(name), reserved])
    subject = Subject(Hybrid(build(0)), Plain(dataset.tokenizer), EOS, 128, CONFIG.batch_size)
    config = dataclasses.replace(CONFIG, tasks={})
    measured = measure(Measured(subject, "b", dataset), config, tmp_path, LENGTH, 0)
    for name, domain in measured["domains"].items():
        packed = results["domains"][name]
        assert (domain["tokens"], domain["bytes"]) == (packed["tokens"], packed["bytes"])
        assert domain["bits_per_byte"] == pytest.approx(packed["bits_per_byte"], rel=0.02)


def test_the_harness_is_imported_only_when_a_task_runs() -> None:
    check = "import sys, pipeline.evaluation.command; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
