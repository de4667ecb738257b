"""Tracking through the death of a real MLflow server: nothing lost, nothing doubled."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipeline.runs import RunFolder
from pipeline.tracking import Tracker, TrackingError
from pipeline.train.metrics import MetricsFile, final_records
from tests.pipeline.test_tracking import tracker

pytestmark = pytest.mark.slow

OUTAGE_SECONDS = 8.0  # in which a call must have given up; a refused connection takes about one
TOKENS = 64  # a step


class Server:
    """`mlflow server` on a SQLite store, which may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(self._port),
             "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db",
             "--default-artifact-root", str(self._folder / "artifacts")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._folder,
            start_new_session=True, env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip
        deadline = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2)
                return
            except OSError:
                assert self._process.poll() is None, "MLflow's server ended"
                assert time.monotonic() < deadline, "MLflow's server did not start"
                time.sleep(0.3)

    def kill(self) -> None:
        """End the server and its workers without warning."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def logged(run: RunFolder, *steps: int) -> None:
    metrics = MetricsFile(run.metrics)
    for step in steps:
        values = {"train/loss": 5.0 / step, "train/grad_norm": 1.0 + step}
        metrics.append("train", step, step * TOKENS, values)
    metrics.close()


def stored(of: Tracker, uri: str, name: str) -> list[tuple[int, float]]:
    history = MlflowClient(uri).get_metric_history(str(of.mlflow_run_id), name)
    return sorted((metric.step, metric.value) for metric in history)


def assert_mlflow_has_the_file_once(run: RunFolder, of: Tracker, uri: str) -> None:
    records = final_records(run.metrics)
    for name in ("train/loss", "train/grad_norm"):
        assert stored(of, uri, name) == [(r["step"], r["metrics"][name]) for r in records]
    by_tokens = [(r["tokens"], r["metrics"]["train/loss"]) for r in records]
    assert stored(of, uri, "by_tokens/train/loss") == by_tokens


def test_a_killed_server_gets_every_point_once_when_it_is_back(
    tmp_path: Path, server: Server
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("seed: 0\n")
    mine = tracker(run, uri=server.uri)
    mine.start()
    logged(run, *range(1, 11))
    mine.ship()
    server.kill()

    logged(run, *range(11, 15))
    started = time.monotonic()
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1"):
        mine.ship()
    assert time.monotonic() - started < OUTAGE_SECONDS
    logged(run, *range(12, 21))  # training went back to step 11 and on, server or not
    with pytest.raises(TrackingError):
        tracker(run, uri=server.uri).ship()  # so does a driver that was started anew

    server.start()
    mine.ship()
    mine.ship()
    assert_mlflow_has_the_file_once(run, mine, server.uri)

    # The driver dies after MLflow took a batch and before it noted so: the batch is sent again.
    noted = (run.path / "tracking.json").read_text()
    logged(run, *range(21, 26))
    mine.ship()
    (run.path / "tracking.json").write_text(noted)
    logged(run, *range(23, 28))  # the run went on from the checkpoint of step 22
    again = tracker(run, uri=server.uri)
    again.ship()
    assert json.loads((run.path / "tracking.json").read_text()) != json.loads(noted)
    assert_mlflow_has_the_file_once(run, again, server.uri)
