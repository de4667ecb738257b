"""A tiny trained run to export, generate from and start from: made in this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.config import Config, ExportConfig, PrecisionConfig
from pipeline.runs import RunFolder
from tests.train.tiny import configuration, corpus, start, train

STEPS = 4


def trained_run(root: Path, **changes: Any) -> tuple[Config, RunFolder]:
    """A run of four steps whose prepare stage left the corpus; all its blocks train in NVFP4."""
    dataset = corpus(root / "data" / "tiny")
    config = dataclasses.replace(
        configuration(root, STEPS),
        precision=PrecisionConfig("nvfp4_paper", first=0, last=0),
    )
    config = dataclasses.replace(config, **changes)
    run = start(config, "trained")
    run.stages.mkdir()
    output = {"output": {"dataset": str(dataset)}}
    (run.stages / "prepare.json").write_text(json.dumps(output))
    train(config, run, dataset)
    return config, run


def with_export(config: Config, format: str, **settings: Any) -> Config:
    return dataclasses.replace(config, export=ExportConfig(format, **settings))


def command(run: RunFolder, verb: str, *overrides: str) -> int:
    """Run a verb of the command line on a run, in this process; its exit code."""
    with pytest.raises(SystemExit) as exit:
        main([verb, f"root={run.path.parent}", f"run={run.id}", *overrides])
    return int(exit.value.code or 0)


def assert_refused(
    run: RunFolder, verb: str, overrides: Sequence[str], message: str, capsys: Any
) -> None:
    """The verb ends with exit code 2 and a message."""
    assert command(run, verb, *overrides) == 2
    assert message in capsys.readouterr().err
