"""The metrics file survives crashes and replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.train.metrics import MetricsError, MetricsFile, final_records, read_records


def test_a_replayed_step_counts_once_with_its_last_value(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    for step, loss in [(1, 5.0), (2, 4.0), (2, 3.0), (3, 2.0)]:
        metrics.append("train", step, step * 10, {"train/loss": loss})
    losses = [r["metrics"]["train/loss"] for r in final_records(tmp_path / "m.jsonl")]
    assert losses == [5.0, 3.0, 2.0]


def test_kinds_of_one_step_stay_apart(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.append("train", 1, 10, {"train/loss": 5.0})
    metrics.append("validation", 1, 10, {"validation/loss_bf16": 4.0})
    assert [r["kind"] for r in final_records(tmp_path / "m.jsonl")] == ["train", "validation"]


def test_a_torn_line_is_ignored_and_what_follows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    MetricsFile(path).append("train", 1, 10, {"train/loss": 5.0})
    with path.open("a") as file:
        file.write('null\n[1]\n{"kind": "train"}\njunk{{{\n{"kind": "train", "st')
    MetricsFile(path).append("train", 2, 20, {"train/loss": 4.0})
    assert [record["step"] for record, _ in read_records(path)] == [1, 2]


def test_reading_goes_on_at_an_offset_and_leaves_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = MetricsFile(path)
    metrics.append("train", 1, 10, {})
    *_, (_, offset) = read_records(path)
    metrics.append("train", 2, 20, {})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert list(read_records(path, offset)) == []
    path.write_bytes(whole)
    assert [record["step"] for record, _ in read_records(path, offset)] == [2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_named_with_the_file_and_the_way_out() -> None:
    with pytest.raises(MetricsError, match=r"/dev/full: .*No space left.*; make room"):
        MetricsFile(Path("/dev/full")).append("train", 1, 10, {"train/loss": 5.0})
