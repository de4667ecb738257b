"""Starting and joining Ray, quietly and without leaving anything behind."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator

from pipeline.config import ClusterConfig

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a local Ray listens on the loopback interface only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
}


def start_ray(address: str | None) -> None:
    """Join the cluster at `address`, or start a local Ray; nothing where Ray runs already.

    A local Ray is told of more CPUs than there are: its tasks (readers, workers) wait for each
    other, and with too few logical CPUs they would wait for ever.
    """
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")  # as a job of a cluster has it
    if address:
        ray.init(address=address, logging_level=logging.WARNING)
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    ray.init(
        address="local",
        num_cpus=local_cpus(),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def local_cpus() -> int:
    """Logical CPUs of a local Ray: more than there are, see `start_ray`."""
    return max(4, (os.cpu_count() or 1) + 2)


@contextlib.contextmanager
def ray_session(address: str | None = None) -> Iterator[None]:
    """Ray for the length of a block; shut down afterwards if this block started it."""
    import ray

    started = not ray.is_initialized()
    start_ray(address)
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def resources_at(address: str) -> dict[str, float] | None:
    """What the Ray cluster at `address` has in all; None where none answers."""
    import ray

    if ray.is_initialized():
        return ray.cluster_resources()
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError:
            return None
    try:
        ray.init(address=address, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError):
        return None
    resources = ray.cluster_resources()
    ray.shutdown()
    return resources


def missing_resources(cluster: ClusterConfig, available: dict[str, float]) -> list[str]:
    """What the configured workers need and a cluster with `available` lacks, in words."""
    workers = cluster.min_workers or cluster.workers
    needs = {
        "CPU": workers * cluster.cpus_per_worker,
        "GPU": workers * cluster.gpus_per_worker,
    }
    lacking = []
    # Ray marks each such node with it.
    if cluster.accelerator and not available.get(f"accelerator_type:{cluster.accelerator}"):
        lacking = [
            f"cluster: the Ray cluster has no node with a card that it knows as "
            f"{cluster.accelerator}; name the one that it has with cluster.accelerator, or null"
        ]
    return lacking + [
        f"cluster: {workers} workers need {need:g} {kind}, the Ray cluster has "
        f"{available.get(kind, 0):g}; lower cluster.workers or cluster.min_workers, or add nodes"
        for kind, need in needs.items()
        if need > available.get(kind, 0)
    ]
