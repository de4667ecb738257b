"""`data show` and `data inspect`: counts that add up, and rows as the model reads them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError, PhaseConfig
from pipeline.data.shards import Dataset
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data_show import describe_corpus, describe_row
from pipeline.lineage import schedule_of
from pipeline.train.build import build_mixture
from tests.train.tiny import GLOBAL_BATCH, LENGTH, configuration, corpus, with_data

PHASES = (
    PhaseConfig(blend={"code": 0.5, "prose": 0.5}),
    PhaseConfig(start="50%", blend={"code": 0.875, "prose": 0.125}),
    PhaseConfig(start="75%", learning_rate="decay"),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "tiny")


def shown(config: Config, dataset: Path) -> str:
    return "\n".join(describe_corpus(config, dataset, schedule_of(config, None)))


def not_repeating(config: Config, name: str) -> Config:
    sources = dict(config.data.sources)
    sources[name] = dataclasses.replace(sources[name], repeat=False)
    return with_data(config, sources=sources)


def test_epochs_of_the_phases_are_what_the_plan_really_reads(tmp_path: Path, dataset: Path) -> None:
    steps = 800
    config = configuration(tmp_path, steps, phases=PHASES)
    text = shown(config, dataset)
    seen = [float(times) for times in re.findall(r"seen (\d+\.\d+) times\n?", text)][:6]
    opened, schedule = Dataset.open(dataset), schedule_of(config, None)
    mixture = build_mixture(config, schedule, opened)
    for name, place in (("code", 0), ("prose", 1)):
        size = opened.num_units(name, LENGTH)
        used = [mixture.used(step * GLOBAL_BATCH)[name] for step in (0, 400, 600, 800)]
        expected = [(after - before) / size for before, after in itertools.pairwise(used)]
        assert seen[place::2] == pytest.approx(expected, abs=0.011)


def test_counts_are_the_manifest_s(tmp_path: Path, dataset: Path) -> None:
    text, opened = shown(configuration(tmp_path, 8), dataset), Dataset.open(dataset)
    for name in opened.sources:
        assert re.search(rf"^{name} .* {opened.num_tokens(name):,} ", text, re.MULTILINE)


def test_a_source_that_is_seen_too_often_is_warned_of(tmp_path: Path, dataset: Path) -> None:
    config = configuration(tmp_path, 800, data={"max_epochs": 2.5})
    assert "warning: prose is seen 3." in shown(config, dataset)
    assert "warning: code" not in shown(config, dataset)
    assert "warning" not in shown(with_data(config, max_epochs=4.0), dataset)


def test_a_source_that_may_not_repeat_ends_the_plan_before_training(
    tmp_path: Path, dataset: Path
) -> None:
    enough = not_repeating(configuration(tmp_path, 8), "prose")
    assert "prose" in shown(enough, dataset)
    too_long = not_repeating(configuration(tmp_path, 800), "prose")
    with pytest.raises(ConfigError, match=r"data\.sources\.prose\.repeat=false: the plan needs"):
        shown(too_long, dataset)


def test_a_row_is_shown_with_its_documents_borders(tmp_path: Path, dataset: Path) -> None:
    config, opened = configuration(tmp_path, 8), Dataset.open(dataset)
    tokenizer = load_tokenizer(opened.tokenizer_path)
    lines = "\n".join(describe_row(config, dataset, "code", 5)).split("\n")
    assert lines[0].startswith("code row 5 of 0 to ")
    counts = [int(match[1]) for line in lines if (match := re.search(r", (\d+) tokens,", line))]
    assert sum(counts) == LENGTH
    texts = [json.loads(line) for line in lines if line.startswith('"')]
    tokens, at = opened.read("code", 5 * LENGTH, LENGTH), 0
    for count, text in zip(counts, texts, strict=True):
        assert text == tokenizer.decode(tokens[at : at + count].tolist())
        at += count


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [("cod", 0, "did you mean code"), (None, 0, "name a source"), ("code", 10**6, "has rows 0 to")],
)
def test_what_does_not_exist_is_named(
    tmp_path: Path, dataset: Path, source: str | None, row: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list(describe_row(configuration(tmp_path, 8), dataset, source, row))
