"""The rendered RayJob's own entry point, run by the Ray Jobs API on a cluster of three nodes.

What Kubernetes would do is done by hand: the ConfigMap becomes a file, a lost worker's pod is
started anew, and after the head is lost the job is submitted again on a fresh cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import ClusterConfig, Config, KubernetesConfig, SourceConfig, from_dict
from pipeline.kubernetes.manifest import manifest
from pipeline.kubernetes.pods import CONFIG_FILE
from pipeline.runs import RunFolder, root_folder
from pipeline.train import checkpoint
from pipeline.train.metrics import read_records
from tests.integration.ray_cluster import Cluster, cluster, free_port
from tests.train.tiny import STEP_TOKENS, configuration, corpus, same_bits, tensors_of

pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed: the extra `cluster`")
pytestmark = [pytest.mark.slow, pytest.mark.integration]

HERE = Path(__file__).resolve().parents[2]
STEPS, EVERY = 160, 5  # steps of a run, and between its checkpoints
WAIT_SECONDS = 500.0
WORKERS = ClusterConfig(workers=2, cpus_per_worker=1.0, address="auto", max_failures=5, nodes=2)
UNDISTURBED = """
import sys, yaml, torch.distributed as dist
from pathlib import Path
from pipeline.config import from_dict
from pipeline.runs import RunFolder
from pipeline.train.loop import Trainer
dist.init_process_group("gloo")
config = from_dict(yaml.safe_load(Path(sys.argv[1]).read_text()))
Trainer(config, RunFolder(Path(sys.argv[2])), Path(sys.argv[3]), "cpu").fit()
"""


def job_of(root: Path, dataset: Path, name: str) -> tuple[str, Path, RunFolder]:
    """The rendered job's command, its ConfigMap as a file where the command looks, and its run."""
    text = root / "text.txt"
    text.write_text("any text will do, the corpus is prepared")
    sources = {item: SourceConfig(uris=(str(text),)) for item in ("code", "prose")}
    config = configuration(root, STEPS, checkpoint_every_tokens=EVERY * STEP_TOKENS)
    pods = KubernetesConfig(image="none", storage_path=str(root), queue=None, wait_seconds=240)
    config = dataclasses.replace(
        config,
        name=name,
        data=dataclasses.replace(config.data, sources=sources),
        cluster=dataclasses.replace(WORKERS, kubernetes=pods),
    )
    objects = manifest(config)
    file = root / f"{name}.yaml"
    file.write_text(objects[0]["data"]["config.yaml"])
    rendered: Config = from_dict(yaml.safe_load(file.read_text()))
    run = RunFolder(root_folder(rendered) / name)
    run.stages.mkdir(parents=True)
    prepared = {"seconds": 0, "output": {"dataset": str(dataset)}}
    (run.stages / "prepare.json").write_text(json.dumps(prepared))
    command = objects[-1]["spec"]["entrypoint"]
    assert CONFIG_FILE in command
    return command.replace(CONFIG_FILE, str(file)), file, run


def train_undisturbed(file: Path, run: RunFolder, dataset: Path) -> list[subprocess.Popen[bytes]]:
    """Two ranks without Ray."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    run.path.mkdir(parents=True)
    command = [sys.executable, "-c", UNDISTURBED, str(file), str(run.path), str(dataset)]
    return [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, cwd=HERE)
        for rank in range(2)
    ]


def submit(on: Cluster, command: str) -> str:
    from ray.job_submission import JobSubmissionClient

    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    variables = {
        "PYTHONPATH": paths,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
    }
    client = JobSubmissionClient(on.dashboard)

    def accepted() -> str:
        try:
            return client.submit_job(entrypoint=command, runtime_env={"env_vars": variables})
        except RuntimeError as error:
            if "No available agent" not in str(error):  # the head's has not joined yet
                raise
            return ""

    return str(until(accepted, "agent that takes jobs"))


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} in {WAIT_SECONDS:.0f} s"
        time.sleep(0.05)
    return value


def ended(on: Cluster, job: str) -> str:
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(on.dashboard)
    until(lambda: client.get_job_status(job).is_terminal(), "end of the job")
    status = client.get_job_status(job)
    return "" if status == JobStatus.SUCCEEDED else client.get_job_logs(job)[-3000:]


def starts(run: RunFolder) -> list[int]:
    """The step at which each sitting of the run began."""
    records = [record for record, _ in read_records(run.metrics)]
    return [record["step"] for record in records if record["kind"] == "start"]


def newest(run: RunFolder) -> int:
    """The step of its newest complete checkpoint; 0 where it has none."""
    found = checkpoint.latest(run.checkpoints)
    return found.step if found else 0


def test_a_job_that_loses_a_worker_and_then_the_head_ends_with_the_undisturbed_weights(
    tmp_path: Path,
) -> None:
    dataset = corpus(tmp_path / "corpus")
    command, file, run = job_of(tmp_path, dataset, "disturbed")
    alone = RunFolder(tmp_path / "alone")
    ranks = train_undisturbed(file, alone, dataset)

    with cluster(workers=2) as on:
        job = submit(on, command)
        until(lambda: newest(run), "first checkpoint")
        on.lose_worker(0)
        on.add_worker()  # as the operator replaces a pod
        until(lambda: len(starts(run)) == 2, "start after a worker was lost")
        until(lambda: newest(run) > starts(run)[1], "checkpoint after a worker was lost")
        on.head.kill()
    with cluster(workers=2) as on:  # as the operator makes a cluster for each attempt
        job = submit(on, command)
        assert not (log := ended(on, job)), log
        assert f"run {run.id}: the newest checkpoint is of step" in logs(on, job)

    assert all(rank.wait(WAIT_SECONDS) == 0 for rank in ranks)
    first, second, third, *more = starts(run)
    assert (first, more) == (0, [])
    assert 0 < second < third < STEPS
    assert newest(run) == STEPS
    assert same_bits(tensors_of(run), tensors_of(alone))


def logs(on: Cluster, job: str) -> str:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(on.dashboard).get_job_logs(job)
