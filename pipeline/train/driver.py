"""Launches the training loop through Ray Train: in this process, or on workers of a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config import Config, ConfigError, PermanentError, UnreachableError, from_dict
from pipeline.ray_session import missing_resources, start_ray
from pipeline.runs import RunFolder
from pipeline.train.parallel import Rank
from pipeline.train.stopping import graceful_stop


def train_on_workers(config: Config, run: RunFolder, dataset: Path) -> dict[str, Any]:
    """Run the loop on `config.cluster` and return rank 0's summary.

    Ray Train places, starts and restarts workers; a restarted worker finds the newest complete
    checkpoint in the run's folder by itself. Raises `ConfigError` where the cluster is smaller
    than asked for, instead of waiting for ever, and `KeyboardInterrupt` where it was asked to stop
    and has written its checkpoint.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # or ranks' logs hold lines twice
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    cluster = config.cluster
    arguments = {"config": config.to_dict(), "run": str(run.path), "dataset": str(dataset)}
    resources = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_worker:
        resources["GPU"] = cluster.gpus_per_worker
    if cluster.workers:
        require_resources(config)
    elif config.data.executor == "ray":
        start_ray(cluster.address)
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    worker: Any = _train_worker
    workers: dict[str, Any] = {"num_workers": cluster.workers}
    if cluster.min_workers:
        workers = {
            "num_workers": (cluster.min_workers, cluster.workers),
            "elastic_resize_monitor_interval_s": cluster.resize_seconds,
        }
    trainer = TorchTrainer(
        worker,
        train_loop_config=arguments,
        scaling_config=ScalingConfig(
            **workers,
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker=resources if cluster.workers else None,
            accelerator_type=cluster.accelerator,
        ),
        run_config=RunConfig(
            name=run.id,
            storage_path=str(run.path / "ray"),
            failure_config=FailureConfig(max_failures=cluster.max_failures),
        ),
    )
    with graceful_stop(run.stop):
        result: Any = trainer.fit()  # its type in Ray's stubs lacks the return value
    outcome = result.return_value
    if "mistake" in outcome:
        raise ConfigError(outcome["mistake"])
    if "permanent" in outcome:
        raise PermanentError(outcome["permanent"])
    if outcome["stopped"]:
        raise KeyboardInterrupt
    return outcome


def _train_worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """What every worker runs.

    What a retry would only repeat is returned, not raised: Ray would try again and again.
    """
    import ray.train.torch

    from pipeline.train.determinism import make_deterministic
    from pipeline.train.loop import Trainer

    config = from_dict(arguments["config"])
    device = str(ray.train.torch.get_device()) if config.cluster.gpus_per_worker else "cpu"
    run, dataset = RunFolder(Path(arguments["run"])), Path(arguments["dataset"])
    preempted = _preempted if config.cluster.workers else None
    with _own_log(run) if config.cluster.workers else contextlib.nullcontext():
        if config.train.deterministic:
            print(f"deterministic: {make_deterministic()}", flush=True)
        try:
            return Trainer(config, run, dataset, device, preempted).fit()
        except ConfigError as error:
            return {"mistake": str(error)}
        except PermanentError as error:
            return {"permanent": str(error)}
        except BaseException:
            traceback.print_exc()
            raise


@contextlib.contextmanager
def _own_log(run: RunFolder) -> Iterator[None]:
    """What this worker prints goes to a file of its rank; the terminal shows progress, once."""
    run.logs.mkdir(exist_ok=True)
    file = run.logs / f"rank-{Rank.current().index:05d}.log"
    with (
        file.open("a", buffering=1) as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        yield


def _preempted() -> bool:
    """Whether Ray has notice that a worker's node will be taken away. A barrier of all workers."""
    import ray.train

    return ray.train.get_preemption_info() is not None


def require_resources(config: Config) -> None:
    """Start or join Ray and refuse what it cannot place. Raises `ConfigError`."""
    import ray

    start_ray(config.cluster.address)
    missing = missing_resources(config.cluster, ray.cluster_resources())
    if missing:
        raise UnreachableError("\n".join(missing))
