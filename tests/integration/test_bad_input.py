"""What bad input gets: one clear line, before training, and nothing half-written."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline import preflight
from pipeline.config import ConfigError
from pipeline.runs import RunFolder, load_config
from pipeline.train.metrics import final_records
from tests.integration.runs import SHORT, Run, pipeline
from tests.pipeline.test_config import composed

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def prepared(finished: Run, tmp_path: Path) -> Path:
    """A root with a copy of the prepared corpus and no run."""
    shutil.copytree(finished.root / "data", tmp_path / "data")
    return tmp_path


def refused(root: Path, *arguments: str) -> str:
    """The one message of a command that must end as the user's mistake."""
    result = pipeline(root, "run", *SHORT, *arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_shard_with_one_flipped_byte_is_named_before_training(prepared: Path) -> None:
    shard = next(prepared.glob("data/*/code-*.tokens"))
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert f"{shard}: damaged" in refused(prepared, "tracking.offline=true")
    (metrics,) = prepared.glob("*/metrics.jsonl")
    assert {record["kind"] for record in final_records(metrics)} == {"prepare"}


def test_a_corpus_that_another_version_wrote_is_refused_by_name(prepared: Path) -> None:
    manifest = next(prepared.glob("data/*/manifest.json"))
    content = json.loads(manifest.read_text())
    content["version"] = 99
    manifest.write_text(json.dumps(content))
    assert "99" in refused(prepared, "tracking.offline=true")


def test_an_unreachable_store_is_told_before_any_work_and_leaves_no_run(tmp_path: Path) -> None:
    message = refused(tmp_path, "tracking.uri=http://127.0.0.1:9")
    assert "tracking.offline=true" in message
    assert not list(tmp_path.iterdir())


def test_a_missing_corpus_folder_is_told_before_any_work(tmp_path: Path) -> None:
    result = pipeline(tmp_path, "run", "data=files", "train=plain", "data.sources.mine.uris=[none]")
    assert result.returncode == 2
    assert "data.sources.mine" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written.*choose another with root="):
        preflight.check(composed(f"root={tmp_path / 'file' / 'runs'}"), ("train",))


def test_a_full_disk_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage(1, 1, 1_000_000))
    with pytest.raises(ConfigError, match=r"0\.00 GB free"):
        preflight.check(composed(f"root={tmp_path}"), ("train",))


def test_checkpoints_that_are_there_need_no_more_room(
    finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    run = RunFolder(finished.folder)
    config = load_config(run)
    have = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file())
    need = 12 * finished.results["parameters"] * (config.train.keep_checkpoints + 1)
    assert 0 < have < need
    room = need - have
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage(1, 1, room))
    preflight._check_precision(config, run)
    with pytest.raises(ConfigError, match="GB free"):
        preflight._check_precision(config, None)


def test_a_run_in_use_is_not_touched_by_a_second_process(finished: Run) -> None:
    with (finished.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = pipeline(finished.root, "report", f"run={finished.folder.name}")
    assert result.returncode == 2
    assert "in use by another process" in result.stderr
    assert finished.results["status"] == "finished"
