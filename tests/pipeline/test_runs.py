"""Finding a run below the root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config import ConfigError
from pipeline.runs import find_run


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
