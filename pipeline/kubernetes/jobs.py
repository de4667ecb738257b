"""Handing a job over and following it: to Kubernetes by kubectl, or to a Ray cluster's Jobs API.

`cluster.address=http://<head>:8265` names a Ray cluster that is there; otherwise the cluster's
`kubernetes` section says where to. Both find a job again by its name, which follows from the run's:
the same overrides submit, follow and stop it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import yaml

from pipeline.config import Config, ConfigError, UnreachableError
from pipeline.entry import training
from pipeline.kubernetes.manifest import STAGES, as_yaml, job_name, manifest, pods_of, run_name
from pipeline.kubernetes.pods import ENTRY
from pipeline.runs import RunFolder, root_folder


class Jobs(Protocol):
    """Where a job runs."""

    def submit(self) -> str:
        """Hand it over; what to tell the user."""

    def logs(self) -> Iterator[str]:
        """What it printed and prints, until it ends."""

    def status(self) -> list[str]:
        """How it does, in lines."""

    def stop(self) -> str:
        """Ask it to write a checkpoint and end; what to tell the user."""


def jobs_of(config: Config) -> Jobs:
    """Raises `ConfigError` where the configuration names neither pods nor a Ray cluster."""
    if (config.cluster.address or "").startswith(("http://", "https://")):
        return RayJobs(config)
    return Kubectl(config)


class Kubectl:
    """Through kubectl, with the user's own context and rights."""

    def __init__(self, config: Config) -> None:
        self._config, self._name = config, job_name(config)
        self._namespace = pods_of(config).namespace
        self._kind = "raycluster" if config.manifest.kind == "cluster" else "rayjob"

    def submit(self) -> str:
        text = as_yaml(manifest(self._config))
        return self._run("apply", "--server-side", "-f", "-", given=text).strip()

    def logs(self) -> Iterator[str]:
        command = [*self._command(), "logs", "--follow", "--tail=-1", f"job/{self._name}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            yield from following.stdout
        if following.returncode:  # kubectl has said why, on standard error
            raise UnreachableError(f"kubectl logs: it ended with code {following.returncode}")

    def status(self) -> list[str]:
        found = json.loads(self._run("get", self._kind, self._name, "-o", "json"))
        state: dict[str, Any] = found.get("status", {})
        cluster = state.get("rayClusterStatus", state)
        lines = {
            self._kind: self._name,
            "deployment": state.get("jobDeploymentStatus", cluster.get("state")),
            "job": state.get("jobStatus"),
            "attempts": f"{state.get('failed', 0)} failed of {found['spec'].get('backoffLimit', 0)}"
            " retries",
            "workers": f"{cluster.get('readyWorkerReplicas', 0)} ready of "
            f"{cluster.get('desiredWorkerReplicas', 0)}",
            "message": state.get("message"),
        }
        pods = self._run("get", "pods", "-l", f"app.kubernetes.io/instance={self._name}")
        return [f"{key:<11} {value}" for key, value in lines.items() if value] + pods.splitlines()

    def stop(self) -> str:
        # Deleting runs each pod's preStop hook, which waits for the checkpoint.
        return self._run("delete", self._kind, self._name).strip()

    def _command(self) -> list[str]:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise ConfigError(
                "kubectl is not installed; install it, or name a Ray cluster's dashboard: "
                "cluster.address=http://<head>:8265"
            )
        return [kubectl, "--namespace", self._namespace]

    def _run(self, *arguments: str, given: str | None = None) -> str:
        done = subprocess.run(
            [*self._command(), *arguments], input=given, capture_output=True, text=True
        )
        if done.returncode:
            raise UnreachableError(f"kubectl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout


class RayJobs:
    """Through the Jobs API of a Ray cluster that is there; its storage must be ours."""

    def __init__(self, config: Config) -> None:
        self._name = job_name(config)
        self._config = dataclasses.replace(
            config,
            name=run_name(config),
            root=str(root_folder(config)),  # a job's working folder is another
            stages=STAGES[config.manifest.kind],
            cluster=dataclasses.replace(config.cluster, address="auto"),
        )
        self._address = str(config.cluster.address)

    def submit(self) -> str:
        client = self._client()
        with tempfile.TemporaryDirectory() as folder:
            text = yaml.safe_dump(self._config.to_dict(), sort_keys=False)
            Path(folder, "config.yaml").write_text(text)
            job = client.submit_job(
                entrypoint=f"exec {ENTRY} config.yaml",
                runtime_env={"working_dir": folder},
                metadata={"name": self._name},
            )
        return f"submitted {self._name} as {job} to {self._address}, root {self._config.root}"

    def logs(self) -> Iterator[str]:
        lines = self._client().tail_job_logs(self._job().submission_id)

        async def following() -> str | None:
            return await anext(lines, None)

        with asyncio.Runner() as runner:
            while (text := runner.run(following())) is not None:
                yield text

    def status(self) -> list[str]:
        job = self._job()
        lines = [f"job         {self._name} ({job.submission_id})"]
        lines += [f"status      {job.status.value}"]
        return lines + ([f"message     {job.message}"] if job.message else [])

    def stop(self) -> str:
        run = RunFolder(root_folder(self._config) / str(self._config.name))
        if training(run):
            run.stop.touch()  # Ray's own stop would kill it after seconds
            return f"asked run {run.id} to write a checkpoint and end"
        job = self._job()
        self._client().stop_job(job.submission_id)
        return f"stopped {self._name} ({job.submission_id})"

    def _job(self) -> Any:
        """The newest one of our name."""
        known = self._client().list_jobs()
        ours = [job for job in known if (job.metadata or {}).get("name") == self._name]
        if not ours:
            raise ConfigError(f"{self._address} knows no job {self._name}; submit it first")
        return max(ours, key=lambda job: job.start_time or 0)

    def _client(self) -> Any:
        try:
            from ray.job_submission import JobSubmissionClient

            return JobSubmissionClient(self._address)
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"cluster.address={self._address}: {error}. The Jobs API needs more of Ray than "
                "training: pip install 'nvfp4-pretrain[cluster]'"
            ) from error
        except ConnectionError as error:
            raise UnreachableError(
                f"cluster.address={self._address}: no answer ({error})"
            ) from error
