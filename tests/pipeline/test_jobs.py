"""Submitting, following and stopping through kubectl, with a kubectl that only takes notes."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.config import Config, ConfigError, UnreachableError
from pipeline.kubernetes.jobs import Kubectl, RayJobs, jobs_of
from pipeline.kubernetes.manifest import manifest
from tests.pipeline.test_config import composed

FAKE = """#!{python}
import json, sys
given = "" if sys.stdin is None or "-f" not in sys.argv else sys.stdin.read()
with open({notes!r}, "a") as notes:
    notes.write(json.dumps([sys.argv[1:], given]) + chr(10))
verb = sys.argv[3]
if {fails}:
    sys.exit("the server is away")
if verb == "get" and "json" in sys.argv:
    print(json.dumps({state}))
elif verb == "logs":
    print("step 1")
    print("step 2")
else:
    print(verb + " done")
"""
STATE = {
    "spec": {"backoffLimit": 20},
    "status": {
        "jobDeploymentStatus": "Running",
        "jobStatus": "RUNNING",
        "failed": 2,
        "rayClusterStatus": {"readyWorkerReplicas": 15, "desiredWorkerReplicas": 16},
    },
}


@pytest.fixture
def config() -> Config:
    return composed("cluster=kind", "name=mine")


class Fake:
    def __init__(self, folder: Path) -> None:
        self._folder, self.notes = folder, folder / "notes"

    def install(self, fails: bool = False) -> None:
        script = self._folder / "kubectl"
        script.write_text(
            FAKE.format(python=sys.executable, notes=str(self.notes), fails=fails, state=STATE)
        )
        script.chmod(0o755)

    def calls(self) -> list[Any]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(tmp_path)
    fake.install()
    monkeypatch.setenv("PATH", str(tmp_path))
    return fake


def test_submit_applies_what_manifest_renders(config: Config, kubectl: Fake) -> None:
    assert jobs_of(config).submit() == "apply done"
    ((arguments, given),) = kubectl.calls()
    assert arguments == ["--namespace", "nvfp4-pretrain", "apply", "--server-side", "-f", "-"]
    assert list(yaml.safe_load_all(given)) == yaml.safe_load(yaml.safe_dump(manifest(config)))


def test_the_same_overrides_follow_and_stop_it(config: Config, kubectl: Fake) -> None:
    jobs = jobs_of(config)
    assert isinstance(jobs, Kubectl)
    assert "".join(jobs.logs()) == "step 1\nstep 2\n"
    text = "\n".join(jobs.status())
    for part in ("train-mine", "Running", "RUNNING", "2 failed of 20", "15 ready of 16"):
        assert part in text
    assert jobs.stop() == "delete done"
    assert kubectl.calls()[-1][0][-3:] == ["delete", "rayjob", "train-mine"]


def test_a_server_that_is_away_and_a_kubectl_that_is_not_there_are_told(
    config: Config, kubectl: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.install(fails=True)
    with pytest.raises(UnreachableError, match="the server is away"):
        jobs_of(config).submit()
    with pytest.raises(UnreachableError, match="kubectl logs"):
        list(jobs_of(config).logs())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="kubectl is not installed"):
        jobs_of(config).submit()


def test_a_ray_cluster_takes_jobs_too() -> None:
    assert isinstance(jobs_of(composed("cluster.address=http://127.0.0.1:8265")), RayJobs)
    with pytest.raises(ConfigError, match=r"cluster\.kubernetes"):
        jobs_of(composed())


def test_what_a_ray_cluster_is_handed_says_where_and_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: dict[str, Any] = {}

    class Client:
        def submit_job(self, entrypoint: str, runtime_env: dict, metadata: dict) -> str:
            text = Path(runtime_env["working_dir"], "config.yaml").read_text()
            handed.update(yaml.safe_load(text))
            return "job-1"

        async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
            for line in ("step 1\n", "step 2\n"):
                yield line

    monkeypatch.setattr(RayJobs, "_client", lambda _: Client())
    monkeypatch.setattr(RayJobs, "_job", lambda _: SimpleNamespace(submission_id="job-1"))
    monkeypatch.chdir(tmp_path)
    asked = ("cluster=cpu2", "cluster.address=http://127.0.0.1:8265", "name=mine")
    for kind, stages in (("train", ["prepare", "train"]), ("eval", ["eval", "report"])):
        jobs = jobs_of(composed(*asked, f"manifest.kind={kind}"))
        assert f"root {tmp_path / 'runs'}" in jobs.submit()
        assert handed["root"] == str(tmp_path / "runs")  # a job's working folder is another
        assert handed["stages"] == stages
    assert list(jobs.logs()) == ["step 1\n", "step 2\n"]
