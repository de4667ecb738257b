"""MLflow, fed from the metrics file by one writer.

A run of the pipeline is one MLflow run, across restarts and later eval stages. Training never
talks to MLflow: rank 0 appends to `metrics.jsonl`, and the driver ships new lines in batches. How
far it got (`tracking.json` in the run's folder: byte offset, last step of each kind) is written
after each batch, so that nothing is lost or sent twice when the store was away or the driver died;
steps replayed after a resume repeat what was sent, and are left out.

Losses are logged against steps under their own names, and against tokens as `by_tokens/<name>`.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Config, TrackingConfig, UnreachableError, flatten
from pipeline.runs import RunFolder, write_whole
from pipeline.train.metrics import read_records

BATCH = 900  # metrics a call; MLflow takes at most 1000
PARAMETERS = 100  # parameters a call, the most that MLflow takes


class TrackingError(RuntimeError):
    """The tracking store did not answer."""


def tracking_uri(tracking: TrackingConfig, root: Path) -> str:
    """The store's URI: as configured, or a SQLite file under the root folder."""
    return tracking.uri or f"sqlite:///{root / 'mlflow.db'}"


def connect(uri: str) -> Any:
    """A client of the store, quiet, and quick to give up."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # no git is no news
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(uri)


def experiment_id(client: Any, tracking: TrackingConfig, root: Path) -> str:
    """The configured experiment's id, made where it is new; another run may make it meanwhile."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(tracking.experiment)
    if found:
        return found.experiment_id
    local = tracking_uri(tracking, root).startswith("sqlite:")
    location = (root / "mlartifacts").as_uri() if local else None
    try:
        return client.create_experiment(tracking.experiment, artifact_location=location)
    except MlflowException:
        found = client.get_experiment_by_name(tracking.experiment)
        if not found:
            raise
        return found.experiment_id


class Tracker:
    """One MLflow run. `offline` trackers do nothing; `pipeline track` sends their metrics later."""

    def __init__(self, config: Config, root: Path, run: RunFolder) -> None:
        self.uri = tracking_uri(config.tracking, root)
        self.offline = config.tracking.offline
        self._config, self._root, self._run = config, root, run
        self._state_file = run.path / "tracking.json"
        self._state: dict[str, Any] = {
            "run_id": None,
            "described": False,
            "offset": 0,
            "last_step": {},
        }
        if self._state_file.is_file():  # one of an earlier version was described at once
            self._state |= {"described": True, **json.loads(self._state_file.read_text())}

    @property
    def mlflow_run_id(self) -> str | None:
        return self._state["run_id"]

    def start(self) -> None:
        """Create this run's MLflow run, or go on with it. Raises `ConfigError` if unreachable."""
        if self.offline:
            return
        try:
            client = self._client()
            if self.mlflow_run_id:
                client.update_run(self.mlflow_run_id, status="RUNNING")
                self._describe(client, self.mlflow_run_id)
                self.ship()
                return
            tags = _tags(self._run)
            if self._config.tracking.parent:
                tags["mlflow.parentRunId"] = self._config.tracking.parent
            experiment = experiment_id(client, self._config.tracking, self._root)
            run = client.create_run(experiment, run_name=self._run.id, tags=tags)
            self._state["run_id"] = run.info.run_id
            self._save_state()
            self._describe(client, run.info.run_id)
        except Exception as error:  # MLflow raises a different class for each kind of store
            raise UnreachableError(
                f"tracking: the store {self.uri} cannot be used ({first_line(error)}); start it, "
                "name another with tracking.uri=..., or train without it: tracking.offline=true"
            ) from error

    def _describe(self, client: Any, run_id: str) -> None:
        """Log parameters and configuration, unless a start before has."""
        if self._state["described"]:
            return
        parameters = _as_parameters(self._config)
        for start in range(0, len(parameters), PARAMETERS):
            client.log_batch(run_id, params=parameters[start : start + PARAMETERS])
        client.log_artifact(run_id, str(self._run.config))
        self._state["described"] = True
        self._save_state()

    def ship(self) -> None:
        """Send the metrics file's new lines. Raises `TrackingError`; a later call goes on."""
        if self.offline:
            return
        batch: list[Any] = []
        state = copy.deepcopy(self._state)
        for record, offset in read_records(self._run.metrics, state["offset"]):
            replayed = record["step"] <= state["last_step"].get(record["kind"], -1)
            if not replayed:
                batch.extend(_as_metrics(record))
                state["last_step"][record["kind"]] = record["step"]
            state["offset"] = offset
            if len(batch) >= BATCH:
                self._send(batch, state)
                batch = []
        if state["offset"] != self._state["offset"]:
            self._send(batch, state)

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Point to a checkpoint as a logged model: no bytes are moved. Raises `TrackingError`."""
        if self.offline:
            return
        import mlflow

        try:
            mlflow.set_tracking_uri(self.uri)
            mlflow.create_external_model(
                name=f"{self._run.id}-step-{step}",
                source_run_id=self.mlflow_run_id,
                experiment_id=self._client().get_run(str(self.mlflow_run_id)).info.experiment_id,
                params={"step": str(step)},
                tags={"uri": str(path)},
                model_type="checkpoint",
            )
        except Exception as error:
            raise TrackingError(f"{self.uri}: {first_line(error)}") from error

    def log_files(self, *paths: Path) -> None:
        """Upload files or folders as artifacts. Raises `TrackingError`."""
        for path in paths:
            name = "log_artifacts" if path.is_dir() else "log_artifact"
            arguments = (str(path), path.name) if path.is_dir() else (str(path),)
            self._call(name, *arguments)

    def log_export(self, folder: Path, record: Mapping[str, Any]) -> None:
        """An export's record as an artifact, and where it lies as a tag. No weights are moved.

        Raises `TrackingError`.
        """
        self._call("log_artifact", str(folder / "export.json"), f"exports/{folder.name}")
        place = f"{folder} ({record['bytes']} bytes, checksum {record['checksum']})"
        self._call("set_tag", f"export.{record['format']}.step-{record['step']}", place)

    def finish(self, status: str) -> None:
        """Ship what is left and close the run as FINISHED, FAILED or KILLED."""
        self.ship()
        self._call("set_terminated", status=status)

    def _send(self, metrics: list[Any], state: dict[str, Any]) -> None:
        for start in range(0, len(metrics), BATCH):
            self._call("log_batch", metrics=metrics[start : start + BATCH])
        self._state = copy.deepcopy(state)
        self._save_state()

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        if self.offline:
            return
        try:
            getattr(self._client(), method)(self.mlflow_run_id, *arguments, **named)
        except Exception as error:
            raise TrackingError(f"{self.uri}: {first_line(error)}") from error

    def _client(self) -> Any:
        return connect(self.uri)

    def _save_state(self) -> None:
        write_whole(self._state_file, json.dumps(self._state))


def _tags(run: RunFolder) -> dict[str, str]:
    """What a run began from; MLflow shows a forked one below its parent."""
    source = run.path / "warm_start.json"
    if source.is_file():
        known = json.loads(source.read_text())
        return {f"init.{key}": str(value) for key, value in known.items() if value is not None}
    file = run.path / "lineage.json"
    if not file.is_file():
        return {}
    lineage = json.loads(file.read_text())
    tags = {
        "fork.run": lineage["parent"],
        "fork.step": str(lineage["step"]),
        "fork.difference": "; ".join(lineage["difference"])[:5000],
    }
    if lineage["mlflow_parent"]:
        tags["mlflow.parentRunId"] = lineage["mlflow_parent"]
    return tags


def _as_metrics(record: Mapping[str, Any]) -> list[Any]:
    """MLflow metrics of one record, with its own time stamp, so that sending twice stores once."""
    from mlflow.entities import Metric

    milliseconds = int(record["time"] * 1000)
    metrics = []
    for name, value in record["metrics"].items():
        metrics.append(Metric(name, float(value), milliseconds, record["step"]))
        if "loss" in name:
            metrics.append(
                Metric(f"by_tokens/{name}", float(value), milliseconds, record["tokens"])
            )
    return metrics


def _as_parameters(config: Config) -> list[Any]:
    """The whole configuration under dotted names; what MLflow would cut stands in its artifact."""
    from mlflow.entities import Param

    return [Param(key, str(value)[:6000]) for key, value in flatten(config.to_dict()).items()]


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
