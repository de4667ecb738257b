"""`train.compile`: off unless asked for, told at start, refused where nothing can compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import ConfigError
from pipeline.data.shards import Dataset
from pipeline.lineage import schedule_of
from pipeline.preflight import _check_compiler
from pipeline.stages import describe_training
from pipeline.train.loop import Trainer
from tests.train.tiny import configuration, corpus, start


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("compile") / "tiny")


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_are_compiled_when_asked_and_the_start_says_so(
    tmp_path: Path, dataset: Path, compiled: bool
) -> None:
    config = configuration(tmp_path, 2, compile=compiled)
    trainer = Trainer(config, start(config, "run"), dataset, "cpu")
    assert trainer.setup.trainable.model.compiled_by == ("inductor" if compiled else None)
    opened = Dataset.open(dataset)
    lines = describe_training(config, opened, schedule_of(config, None))["lines"]
    for kind, path in trainer.setup.trainable.model.paths().items():
        (line,) = [line for line in lines if line.split()[0] == kind]
        assert path in line
        assert ("compiled" in line) == compiled


def test_without_a_compiler_it_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _check_compiler(configuration(tmp_path, 2))
    with pytest.raises(ConfigError, match=r"train\.compile=false"):
        _check_compiler(configuration(tmp_path, 2, compile=True))
