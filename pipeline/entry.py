"""What a cluster's job runs: one configuration file, tried again until it is done or hopeless.

    python -m pipeline.entry config.yaml          train, or go on from the newest checkpoint
    python -m pipeline.entry config.yaml --stop   ask that run to stop, and wait for its checkpoint

A job runner only knows "again": KubeRay retries a failed job on a fresh cluster, knowing nothing of
the run. So everything is looked up in the run's folder, which all of them share. The configuration
names the run; where the folder holds a complete checkpoint training goes on from it. Where it holds
the marker of a permanent failure of this very configuration, nothing is tried, and the attempt ends
within seconds. A mistake that a retry would repeat leaves that marker; a store or nodes that do not
answer leave none.

SIGTERM is training's to answer (`pipeline.train.stopping`): it finishes the step, writes a
checkpoint and ends with 75. A pod that is taken away runs `--stop` first, since its SIGTERM reaches
Ray and not this process.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import yaml

from pipeline.cli import FAILURE, TRY_AGAIN, USER_MISTAKE
from pipeline.config import (
    Config,
    ConfigError,
    IncompleteError,
    PermanentError,
    UnreachableError,
    digest,
    from_dict,
)
from pipeline.runs import RunFolder, is_locked, root_folder, write_whole

DONE = 0
POLL_SECONDS = 2.0


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line above and exit with its code."""
    parser = argparse.ArgumentParser(prog="pipeline.entry", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0, help="that --stop waits")
    options = parser.parse_args(arguments)
    try:
        config = from_dict(yaml.safe_load(options.config.read_text()))
    except (ConfigError, OSError, yaml.YAMLError) as error:
        print(f"error: {options.config}: {error}", file=sys.stderr)
        sys.exit(USER_MISTAKE)
    if not config.name:
        print(
            "error: name: a job that may be retried needs the run's name in its file",
            file=sys.stderr,
        )
        sys.exit(USER_MISTAKE)
    run = RunFolder(root_folder(config) / config.name)
    sys.exit(stop(run, options.seconds) if options.stop else attempt(config, run))


def attempt(config: Config, run: RunFolder) -> int:
    """One attempt at the run; its exit code."""
    from pipeline.lifecycle import evaluate, start
    from pipeline.train import checkpoint

    judges = "eval" in config.stages and "train" not in config.stages  # a run that exists
    marker = run.eval_failure if judges else run.failure
    identity = digest(config.to_dict())
    if why := hopeless(marker, identity):
        print(f"run {run.id} failed for good and is not tried again: {why}", flush=True)
        return USER_MISTAKE
    steps = checkpoint.steps_in(run.checkpoints)
    stands = f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint"
    print(f"run {run.id}: {stands}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wait_for_nodes(config)
        if judges:
            evaluate(config)
        else:
            start(config, config.stages)
    except IncompleteError as error:  # another attempt would lack the same
        print(f"incomplete: {error}", file=sys.stderr)
    except UnreachableError as error:
        print(f"error: {error}", file=sys.stderr)
        return TRY_AGAIN
    except (ConfigError, PermanentError) as error:
        run.path.mkdir(parents=True, exist_ok=True)
        write_whole(marker, json.dumps({"error": str(error), "config": identity}))
        print(f"error: {error}", file=sys.stderr)
        return USER_MISTAKE if isinstance(error, ConfigError) else FAILURE
    except KeyboardInterrupt:
        return TRY_AGAIN
    return DONE


def hopeless(marker: Path, identity: str) -> str:
    """Why this configuration of the run failed for good; "" where it did not.

    A marker of another configuration is removed: the mistake may be mended.
    """
    if not marker.is_file():
        return ""
    found = json.loads(marker.read_text())
    if found.get("config", identity) == identity:
        return str(found["error"])
    marker.unlink()
    return ""


def wait_for_nodes(config: Config, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until a fresh cluster has what the workers need, or its time is over.

    Raises `UnreachableError` then. Nothing to wait for without workers, or without pods.
    """
    pods = config.cluster.kubernetes
    if not config.cluster.workers or pods is None:
        return
    import ray

    from pipeline.ray_session import missing_resources, start_ray

    start_ray(config.cluster.address)
    deadline = time.monotonic() + pods.wait_seconds
    while missing := missing_resources(config.cluster, ray.cluster_resources()):
        if time.monotonic() > deadline:
            raise UnreachableError("\n".join(missing))
        sleep(POLL_SECONDS)


def stop(run: RunFolder, seconds: float) -> int:
    """Ask a run that is under way to stop, and wait until its process has let go of it."""
    if not training(run):
        return DONE
    run.stop.touch()
    deadline = time.monotonic() + seconds
    while training(run):
        if time.monotonic() > deadline:
            return FAILURE
        time.sleep(POLL_SECONDS)
    return DONE


def training(run: RunFolder) -> bool:
    """Whether the run says that it is under way, and a process holds it."""
    if not run.results.is_file() or not is_locked(run):
        return False
    return json.loads(run.results.read_text()).get("status") == "running"


if __name__ == "__main__":
    main()
