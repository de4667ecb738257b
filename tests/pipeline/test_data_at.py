"""`data at` shows what a step was trained on: the very tokens that the stream gave."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError, PhaseConfig
from pipeline.data.lookup import units_of
from pipeline.data.shards import Dataset, content_hash
from pipeline.data.stream import MixtureStream
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data_at import describe_step
from pipeline.lineage import schedule_of
from pipeline.runs import RunFolder
from pipeline.train.build import build_mixture
from tests.data.corpora import EOS
from tests.train.tiny import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    configuration,
    corpus,
    start,
    train,
    train_until,
    with_data,
)

STEPS = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "tiny")


def prepared(config: Config, name: str, dataset: Path) -> RunFolder:
    """A fresh run whose prepare stage is done."""
    run = start(config, name)
    run.stages.mkdir()
    (run.stages / "prepare.json").write_text(json.dumps({"output": {"dataset": str(dataset)}}))
    return run


def stream_of(config: Config, run: RunFolder, dataset: Path) -> MixtureStream:
    opened, schedule = Dataset.open(dataset), schedule_of(config, run)
    return MixtureStream(opened, build_mixture(config, schedule, opened), schedule.unit_length)


@pytest.mark.parametrize("step", [0, 3, 5])
def test_the_documents_tokens_are_those_that_the_step_read(
    tmp_path: Path, dataset: Path, step: int
) -> None:
    config = configuration(tmp_path, STEPS)
    stream = stream_of(config, prepared(config, "run", dataset), dataset)
    first = step * GLOBAL_BATCH
    batch = stream.read(first, GLOBAL_BATCH, LENGTH)
    tokenizer = load_tokenizer(stream.dataset.tokenizer_path)
    units = list(units_of(stream, range(first, first + GLOBAL_BATCH), tokenizer))
    assert [unit.index for unit in units] == list(range(first, first + GLOBAL_BATCH))
    for row, unit in enumerate(units):
        tokens = [int(token) for document in unit.documents for token in document.tokens]
        assert tokens == batch.tokens_BT[row].tolist()
        assert unit.source == stream.mixture.names[int(batch.source_B[row])]
        numbers = [document.number for document in unit.documents]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(numbers) == int(batch.seq_idx_BT[row].max()) + 1
        for place, document in enumerate(unit.documents):
            assert document.ends == (int(document.tokens[-1]) == EOS)
            assert document.begins or place == 0
            assert document.text == tokenizer.decode(document.tokens.tolist())[:60]


def test_documents_are_numbered_through_a_source_s_shards(dataset: Path) -> None:
    opened = Dataset.open(dataset)
    whole = opened.documents_of("code", 0, opened.num_tokens("code"))
    assert [number for number, _, _ in whole] == list(range(140))
    assert whole[0][1] == 0
    assert [end for _, _, end in whole[:-1]] == [first for _, first, _ in whole[1:]]
    for number, first, end in whole:
        tokens = opened.read("code", first, end - first)
        assert tokens[-1] == EOS
        assert (tokens == EOS).sum() == 1
        assert opened.documents_of("code", first, end - first) == [(number, first, end)]
        assert opened.documents_of("code", end - 1, 1) == [(number, first, end)]


def test_the_lines_name_micro_batch_row_shard_and_text(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, STEPS)
    run = prepared(config, "run", dataset)
    lines = list(describe_step(config, run, 4))
    pattern = r"\nunit (\d+)  micro-batch (\d)  (code|prose) row (\d+)  (\S+\.tokens)"
    heads = [match for line in lines if (match := re.match(pattern, line))]
    assert [int(head[1]) for head in heads] == list(range(16, 20))
    assert [int(head[2]) for head in heads] == [i // MICRO_BATCH for i in range(GLOBAL_BATCH)]
    _, rows = stream_of(config, run, dataset).mixture.locate(range(16, 20))
    assert [int(head[4]) for head in heads] == rows.tolist()
    assert all(head[5].startswith(head[3]) for head in heads)
    documents = [line for line in lines if line.startswith("  document")]
    sizes = [int(re.findall(r"(\d+) tokens", line)[0]) for line in documents]
    assert sum(sizes) == GLOBAL_BATCH * LENGTH
    assert all(re.search(r"  (whole|begins|ends|inside) +\"", line) for line in documents)
    assert "point 5 of the curves, at 320 tokens" in lines[1]


def test_what_was_left_out_or_blocked_is_said(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, STEPS)
    run = prepared(config, "run", dataset)
    train_until(config, run, dataset, 3)
    shards = tuple(sorted(Dataset.open(dataset).shard_names)[::2])
    train(with_data(config, skip=(4,), block=shards), run, dataset)
    before = "\n".join(describe_step(config, run, 2))
    assert "blocked" not in before
    assert "left out" not in before
    shown = list(describe_step(config, run, 4))
    assert "left out    data.skip names this step: it passes without an update" in shown
    for line in shown:
        if line.startswith("\nunit"):
            named = re.findall(r"\S+\.tokens", line.replace(",", ""))
            assert ("blocked: weighs nothing" in line) == bool(set(named) & set(shards))
    assert any("blocked: weighs nothing" in line for line in shown)


def test_a_step_that_training_skipped_says_why(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, STEPS)
    run = prepared(config, "run", dataset)
    notes = ["step 2: skipped, loss nan", "step 20: skipped, loss inf"]
    records = [{"kind": "note", "step": 2, "tokens": 0, "time": 0, "metrics": {}, "note": note}
               for note in notes]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "skipped     step 2: skipped, loss nan" in list(describe_step(config, run, 2))
    assert not any("loss inf" in line for line in describe_step(config, run, 2))


def test_a_child_s_steps_before_the_fork_are_its_parent_s(tmp_path: Path, dataset: Path) -> None:
    first = configuration(tmp_path, 4)
    parent = prepared(first, "parent", dataset)
    train(first, parent, dataset)
    config = configuration(
        tmp_path, 8, fork_from="parent@4", phases=(PhaseConfig(blend={"prose": 1.0}),)
    )
    child = prepared(config, "child", dataset)
    assert list(describe_step(config, child, 3)) == list(describe_step(first, parent, 3))
    after = list(describe_step(config, child, 4))
    assert after[0] == "run         child"
    assert {line.split()[4] for line in after if line.startswith("\nunit")} == {"prose"}


def test_mistakes_are_named(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path / "runs", STEPS)
    home = Path(shutil.copytree(dataset, tmp_path / "corpus"))
    run = prepared(config, "run", home)
    for step in (-1, STEPS):
        with pytest.raises(ConfigError, match=f"step={step}: the steps of run run are 0 to 5"):
            list(describe_step(config, run, step))
    train(config, run, home)
    shutil.rmtree(home)
    with pytest.raises(ConfigError, match=r"manifest\.json: missing"):
        list(describe_step(config, run, 0))


def test_a_corpus_that_is_another_one_by_now_is_refused(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path / "runs", STEPS)
    run = prepared(config, "run", dataset)
    train(config, run, dataset)
    other = corpus(tmp_path / "other")
    file = other / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["remark"] = "prepared from other text"
    manifest["content_hash"] = content_hash(manifest)
    file.write_text(json.dumps(manifest))
    (run.stages / "prepare.json").write_text(json.dumps({"output": {"dataset": str(other)}}))
    with pytest.raises(ConfigError, match="not the corpus that run run was trained on"):
        list(describe_step(config, run, 0))
