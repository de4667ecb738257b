"""Finding a run below the root, and what a failed start leaves there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline import lifecycle
from pipeline.config import ConfigError, UnreachableError
from pipeline.runs import RunFolder, find_run
from pipeline.tracking import Tracker
from tests.train.tiny import configuration


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Runs whose names sort otherwise than their times."""
    for started, name in enumerate(("zebra", "20260131-120000-bf16-1a2b", "apple")):
        (tmp_path / name).mkdir()
        config = tmp_path / name / "config.yaml"
        config.write_text("{}")
        os.utime(config, (1e9 + started, 1e9 + started))
    return tmp_path


def test_latest_is_the_run_that_was_started_last_whatever_its_name(root: Path) -> None:
    assert find_run(root, "latest").id == "apple"
    os.utime(root / "zebra" / "config.yaml", (2e9, 2e9))
    assert find_run(root, "latest").id == "zebra"


def test_a_beginning_names_a_run_and_what_names_none_is_refused(root: Path) -> None:
    assert find_run(root, "2026").id == "20260131-120000-bf16-1a2b"
    with pytest.raises(ConfigError, match=r"run=aple: no such run .* did you mean apple"):
        find_run(root, "aple")


@pytest.mark.parametrize("there", [True, False])
def test_a_start_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    def away(_: Tracker) -> None:
        raise UnreachableError("the store is away")

    monkeypatch.setattr(Tracker, "start", away)
    config = configuration(tmp_path, 4)
    found = RunFolder(tmp_path / "thesis")
    if there:
        found.checkpoints.mkdir(parents=True)
        (found.path / "notes.txt").write_text("mine")
    with pytest.raises(UnreachableError):
        lifecycle.work(config, found, ("train",), again=False)
    left = sorted(path.name for path in found.path.iterdir()) if found.path.exists() else None
    assert left == (["checkpoints", "notes.txt"] if there else None)
