"""MLflow gets every metric once, whatever happens to it or to the driver."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from pipeline.config import Config, ConfigError, TrackingConfig
from pipeline.lineage import Lineage, write_lineage
from pipeline.runs import RunFolder
from pipeline.tracking import Tracker, TrackingError
from pipeline.train.metrics import MetricsFile
from tests.pipeline.test_config import composed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose store is made once: its migrations take seconds."""
    return tmp_path_factory.mktemp("tracked")


@pytest.fixture
def run(root: Path, request: pytest.FixtureRequest) -> RunFolder:
    folder = RunFolder(root / request.node.name)
    folder.path.mkdir()
    folder.config.write_text("seed: 0\n")
    return folder


def tracker(run: RunFolder, **tracking: Any) -> Tracker:
    config: Config = dataclasses.replace(composed(), tracking=TrackingConfig(**tracking))
    return Tracker(config, run.path.parent, run)


def stored(run: RunFolder, of: Tracker, name: str = "train/loss") -> list[tuple[int, float]]:
    client = MlflowClient(of.uri)
    return sorted((m.step, m.value) for m in client.get_metric_history(of.mlflow_run_id, name))


def test_metrics_arrive_by_step_and_by_tokens_once(run: RunFolder) -> None:
    mine = tracker(run)
    mine.start()
    metrics = MetricsFile(run.metrics)
    for step in (1, 2):
        metrics.append("train", step, step * 100, {"train/loss": 1.0 / step})
        mine.ship()
        mine.ship()
    assert stored(run, mine) == [(1, 1.0), (2, 0.5)]
    assert stored(run, mine, "by_tokens/train/loss") == [(100, 1.0), (200, 0.5)]


def test_replayed_steps_are_not_drawn_twice(run: RunFolder) -> None:
    mine = tracker(run)
    mine.start()
    for steps in ((1, 2, 3), (2, 3, 4)):
        metrics = MetricsFile(run.metrics)
        for step in steps:
            metrics.append("train", step, step, {"train/loss": float(step)})
        restarted = tracker(run)
        restarted.start()
        restarted.ship()
    assert restarted.mlflow_run_id == mine.mlflow_run_id
    assert stored(run, mine) == [(step, float(step)) for step in (1, 2, 3, 4)]


def test_a_store_that_goes_away_gets_all_when_it_returns(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tracker(run)
    mine.start()
    metrics = MetricsFile(run.metrics)
    metrics.append("train", 1, 1, {"train/loss": 1.0})

    def away() -> Any:
        raise ConnectionError("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(mine, "_client", away)
        with pytest.raises(TrackingError, match="connection refused"):
            mine.ship()
    metrics.append("train", 2, 2, {"train/loss": 2.0})
    mine.ship()
    assert stored(run, mine) == [(1, 1.0), (2, 2.0)]


def test_an_unreachable_store_is_refused_before_training_with_the_way_out(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9.*tracking\.offline=true"):
        tracker(run, uri="http://127.0.0.1:9").start()


def test_a_store_of_another_version_is_refused_by_name(run: RunFolder, tmp_path: Path) -> None:
    import sqlite3

    store = tmp_path / "old.db"
    with sqlite3.connect(store) as database:
        database.execute("create table alembic_version (version_num varchar(32) not null)")
        database.execute("insert into alembic_version values ('0123456789ab')")
        database.execute("create table experiments (experiment_id integer)")
    with pytest.raises(ConfigError, match="cannot be used"):
        tracker(run, uri=f"sqlite:///{store}").start()


def test_an_offline_run_can_be_sent_later(run: RunFolder) -> None:
    offline = tracker(run, offline=True)
    offline.start()
    MetricsFile(run.metrics).append("train", 1, 1, {"train/loss": 1.0})
    offline.ship()
    offline.finish("FINISHED")
    assert offline.mlflow_run_id is None
    later = tracker(run)
    later.start()
    later.finish("FINISHED")
    assert stored(run, later) == [(1, 1.0)]
    assert MlflowClient(later.uri).get_run(later.mlflow_run_id).info.status == "FINISHED"


def test_a_batch_that_is_sent_again_is_stored_once(run: RunFolder) -> None:
    mine = tracker(run)
    mine.start()
    noted = (run.path / "tracking.json").read_text()
    metrics = MetricsFile(run.metrics)
    for step, loss in ((1, 2.0), (2, float("nan")), (3, float("inf"))):
        metrics.append("train", step, step, {"train/loss": loss})
    mine.ship()
    (run.path / "tracking.json").write_text(noted)  # as after a kill before the offset was noted
    tracker(run).ship()
    assert [step for step, _ in stored(run, mine)] == [1, 2, 3]


def test_parameters_that_a_start_could_not_log_are_logged_by_the_next(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise OSError("the store went away")

    mine = tracker(run)
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", away)
        with pytest.raises(ConfigError, match="the store went away"):
            mine.start()
    again = tracker(run)
    again.start()
    assert again.mlflow_run_id == mine.mlflow_run_id
    assert MlflowClient(again.uri).get_run(again.mlflow_run_id).data.params
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", away)  # they are not logged a second time
        tracker(run).start()


def test_a_child_stands_below_its_parent(run: RunFolder) -> None:
    mine = tracker(run)
    mine.start()
    born = RunFolder(run.path.parent / "child")
    born.path.mkdir()
    born.config.write_text("seed: 0\n")
    changed = ("train.tokens (1 then, 2 now)", "seed (0 then, 1 now)")
    write_lineage(born, Lineage(run.id, 4, 256, "", changed, (), "", mine.mlflow_run_id))
    child = tracker(born)
    child.start()
    client = MlflowClient(child.uri)
    tags = client.get_run(str(child.mlflow_run_id)).data.tags
    assert tags["mlflow.parentRunId"] == mine.mlflow_run_id
    assert (tags["fork.run"], tags["fork.step"]) == (run.id, "4")
    assert tags["fork.difference"] == "; ".join(changed)
    experiment = client.get_run(str(child.mlflow_run_id)).info.experiment_id
    below = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{mine.mlflow_run_id}'")
    assert [found.info.run_name for found in below] == ["child"]
    assert "fork.run" not in client.get_run(str(mine.mlflow_run_id)).data.tags


def test_a_child_of_a_run_that_was_never_tracked_has_no_parent_in_mlflow(run: RunFolder) -> None:
    write_lineage(run, Lineage("parent", 4, 256, "", (), (), ""))
    mine = tracker(run)
    mine.start()
    tags = MlflowClient(mine.uri).get_run(str(mine.mlflow_run_id)).data.tags
    assert tags["fork.run"] == "parent"
    assert "mlflow.parentRunId" not in tags


def test_many_metrics_are_sent_in_batches_that_mlflow_takes(run: RunFolder) -> None:
    mine = tracker(run)
    mine.start()
    values = {f"quant/{i}": float(i) for i in range(1500)}
    MetricsFile(run.metrics).append("statistics", 1, 1, values)
    mine.ship()
    assert len(MlflowClient(mine.uri).get_run(mine.mlflow_run_id).data.metrics) == 1500


def test_what_follows_a_full_batch_is_sent_too(run: RunFolder) -> None:
    mine = tracker(run)
    mine.start()
    metrics = MetricsFile(run.metrics)
    metrics.append("statistics", 1, 1, {f"quant/{i}": float(i) for i in range(950)})
    metrics.append("train", 1, 1, {"train/loss": 1.0})
    mine.ship()
    assert stored(run, mine) == [(1, 1.0)]


def test_an_outage_between_two_batches_loses_nothing(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tracker(run)
    mine.start()
    metrics = MetricsFile(run.metrics)
    for step in (1, 2):
        metrics.append("statistics", step, step, {f"quant/{i}": float(i) for i in range(900)})
    send = mine._call
    calls = iter((send,))

    def away_after_the_first(*arguments: Any, **named: Any) -> None:
        following = next(calls, None)
        if following is None:
            raise TrackingError("connection refused")
        following(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(mine, "_call", away_after_the_first)
        with pytest.raises(TrackingError):
            mine.ship()
    mine.ship()
    assert stored(run, mine, "quant/7") == [(1, 7.0), (2, 7.0)]
