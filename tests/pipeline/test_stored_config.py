"""Configurations that runs have stored, read by a later version."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config import ConfigError
from pipeline.runs import RunFolder, load_config
from tests.pipeline.test_config import composed


def stored(folder: Path, section: str) -> RunFolder:
    """A run whose configuration has a key that this version does not know."""
    raw = composed().to_dict()
    raw[section]["shards"] = 8
    run = RunFolder(folder)
    run.config.write_text(yaml.safe_dump(raw))
    return run


def test_keys_of_plans_and_manifests_that_went_do_not_hide_a_run(tmp_path: Path) -> None:
    assert load_config(stored(tmp_path, "plan")).fingerprint() == composed().fingerprint()


def test_keys_of_a_run_that_went_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a configuration .*model.shards"):
        load_config(stored(tmp_path, "model"))
