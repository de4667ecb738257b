"""Configuration: every file composes, and what Hydra composes is checked into dataclasses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from pipeline.config import (
    ClusterConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalsConfig,
    ModelSection,
    PrecisionConfig,
    TrackingConfig,
    TrainConfig,
    from_dict,
)
from pipeline.help import CONF, experiments, groups
from pipeline.train.schedule import Schedule


def composed_raw(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("conf", version_base="1.3"):
        raw = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(raw, dict)
    return raw


def composed(*overrides: str) -> Config:
    return from_dict(composed_raw(*overrides))


@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_composes_with_nothing_left_to_interpolate(experiment: str) -> None:
    config = composed(f"+experiment={experiment}")
    assert "${" not in json.dumps(config.to_dict())
    assert from_dict(config.to_dict()) == config
    Schedule.of(config.train, tuple(config.data.sources))


@pytest.mark.parametrize(
    ("group", "choice"),
    [(group, choice) for group, names in groups().items() for choice in names
     if group not in ("experiment", "study")],
)  # fmt: skip
def test_every_choice_of_every_group_builds(group: str, choice: str) -> None:
    needed = ["data.sources.mine.uris=[somewhere]"] if choice == "files" else []
    composed(f"{group}={choice}", *needed)


PAPER = {  # facts of arXiv 2509.25149, as the experiments must state them
    "12b_nvfp4": ("nvfp4_paper", 2, 8, 62, 10e12, 736, 4.5e-4, 4.5e-6, (0, 0.7, 0.8, 0.9)),
    "12b_fp8": ("fp8_block", 1, 2, 62, 10e12, 736, 4.5e-4, 4.5e-6, (0, 0.7, 0.8, 0.9)),
    "8b_nvfp4": ("nvfp4_paper", 0, 8, 52, 1e12, 768, 8e-4, 8e-6, (0, 0.6, 0.85)),
    "8b_bf16": ("bf16", 0, 0, 52, 1e12, 768, 8e-4, 8e-6, (0, 0.6, 0.85)),
    "1b_dense_nvfp4": ("nvfp4_paper", 0, 8, 40, 1e12, 768, 1.2e-3, 1.2e-5, (0, 0.85)),
}


@pytest.mark.parametrize("experiment", PAPER)
def test_experiments_have_the_paper_s_numbers(experiment: str) -> None:
    recipe, first, last, blocks, tokens, batch, peak, final, starts = PAPER[experiment]
    config = composed(f"+experiment={experiment}")
    train = config.train
    assert dataclasses.astuple(config.precision) == (recipe, first, last)
    assert len(config.model.pattern) == blocks
    assert (train.tokens, train.global_batch, train.sequence_length) == (tokens, batch, 8192)
    assert (train.learning_rate, train.final_learning_rate) == (peak, final)
    assert (train.beta1, train.beta2, train.weight_decay) == (0.9, 0.95, 0.1)
    schedule = Schedule.of(train, tuple(config.data.sources))
    shares = [phase.start_step / schedule.num_steps for phase in schedule.phases]
    assert shares == pytest.approx(starts, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sed": 1}, "sed: no such key; did you mean seed"),
        ({"model": {"hidden": 1}}, "model.hidden: no such key; did you mean"),
        ({"seed": None}, "seed: missing"),
        ({"seed": 1.5}, "seed: expected int, got 1.5"),
        ({"seed": True}, "seed: expected int, got True"),
        ({"stages": "train"}, "stages: expected a list"),
        ({"data": {"sources": []}}, "data.sources: expected names with values"),
        ({"train": 3}, "train: expected keys with values, got 3"),
    ],
)
def test_mistakes_are_named_by_their_full_path(change: dict[str, object], message: str) -> None:
    raw = composed().to_dict()
    for key, value in change.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=message):
        from_dict(raw)


def test_the_fingerprint_knows_what_decides_the_weights() -> None:
    config = composed()
    assert config.fingerprint() == composed("evals.num_questions=7", "root=/x").fingerprint()
    assert config.fingerprint() != composed("seed=1").fingerprint()
    assert config.fingerprint() != composed("precision=bf16").fingerprint()


def test_conf_is_found_beside_the_packages() -> None:
    assert (Path(CONF) / "config.yaml").is_file()


@pytest.mark.parametrize("group", [g for g in groups() if g not in ("experiment", "study")])
def test_every_key_stands_in_its_files_so_that_it_can_be_overridden(group: str) -> None:
    section = {"train": TrainConfig, "data": DataConfig, "model": ModelSection,
               "precision": PrecisionConfig, "evals": EvalsConfig, "tracking": TrackingConfig,
               "cluster": ClusterConfig}[group]  # fmt: skip
    keys = {field.name for field in dataclasses.fields(section)}
    for choice in groups()[group]:
        content = composed_raw(f"{group}={choice}")[group]
        assert keys - set(content) == set(), choice
