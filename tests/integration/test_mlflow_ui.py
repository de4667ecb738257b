"""MLflow's own page shows the run, its metrics and its report, in a real browser."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.integration.runs import Run

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def server(finished: Run) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = f"sqlite:///{finished.root}/mlflow.db"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store,
         "--port", str(port), "--workers", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=finished.root,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            break
        except OSError:
            assert time.monotonic() < deadline, "MLflow's server did not start"
            time.sleep(0.5)
    yield url
    process.terminate()
    process.wait(timeout=30)


def page(url: str, folder: str) -> str:
    """The text of a page after its scripts have run."""
    assert CHROMIUM is not None
    result = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", f"--user-data-dir={folder}", "--virtual-time-budget=30000",
         "--dump-dom", url],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    return result.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_finds_the_run_its_metrics_and_its_report(
    finished: Run, server: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from mlflow import MlflowClient

    run = MlflowClient(f"sqlite:///{finished.root}/mlflow.db").get_run(
        finished.results["mlflow_run_id"]
    )
    base = f"{server}/#/experiments/{run.info.experiment_id}/runs"
    profile = str(tmp_path_factory.mktemp("chromium"))
    assert finished.folder.name in page(base, profile)
    assert "train/loss" in page(f"{base}/{run.info.run_id}", profile)
    artifacts = page(f"{base}/{run.info.run_id}/artifacts", profile)
    assert "report.html" in artifacts
