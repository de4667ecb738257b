"""The Kubernetes objects of a job, from the configuration that `run` takes.

A ConfigMap holds that configuration, resolved; nodes, GPUs, image and limits of the pods come from
its `cluster` section. So what is scheduled and what trains cannot disagree.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml

from pipeline.config import ClusterConfig, Config, ConfigError, KubernetesConfig, from_dict
from pipeline.kubernetes import pods as templates
from pipeline.kubernetes.pods import CONFIG_FILE, ENTRY, PART_OF

RAY_VERSION = "2.60.0"
NAME_LENGTH = 40  # KubeRay allows 47, and the names of what belongs to a job are longer
WORKERS = "workers"
STAGES = {"train": ("prepare", "train"), "eval": ("eval", "report"), "cluster": ("prepare",)}


def manifest(config: Config) -> list[dict[str, Any]]:
    """The objects, in the order to apply them. Raises `ConfigError` for what has no pods."""
    pods = pods_of(config)
    kind = config.manifest.kind
    name = job_name(config)
    inside = within_cluster(config)
    labels = PART_OF | {"app.kubernetes.io/instance": name}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, pods, labels),
        "data": {"config.yaml": yaml.safe_dump(inside.to_dict(), sort_keys=False)},
    }
    several = config.cluster.nodes > 1 and pods.compute_domain and kind != "eval"
    imex = f"{name}-imex" if several else None
    spec = cluster_spec(config.cluster, pods, name, imex, 1 if kind == "eval" else None)
    queue = {"kueue.x-k8s.io/queue-name": pods.queue} if pods.queue else {}
    metadata = _metadata(name, pods, labels | queue)
    if kind == "cluster":
        body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
    else:
        body = ray_job(config, pods, metadata, spec)
    domain = [_compute_domain(name, pods, labels, imex)] if imex else []
    return [config_map, *domain, body]


def ray_job(
    config: Config, pods: KubernetesConfig, metadata: dict[str, Any], cluster: dict[str, Any]
) -> dict[str, Any]:
    """A RayJob. Ray Train's controller dies with the head, so the whole job is what is retried:
    on a fresh cluster, where the entry point finds the run's newest checkpoint."""
    spec: dict[str, Any] = {
        "entrypoint": f"exec {ENTRY} {CONFIG_FILE}",
        "submissionMode": "K8sJobMode",
        "submitterConfig": {"backoffLimit": 0},
        "backoffLimit": pods.retries,
        "activeDeadlineSeconds": pods.deadline_hours * 3600,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "submitterPodTemplate": templates.submitter(pods, metadata["name"]),
        "rayClusterSpec": cluster,
    }
    if config.manifest.kind == "eval" and config.cluster.gpus_per_worker:
        spec["entrypointNumGpus"] = 1
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def cluster_spec(
    cluster: ClusterConfig,
    pods: KubernetesConfig,
    config_map: str,
    imex: str | None,
    nodes: int | None = None,
) -> dict[str, Any]:
    """A head and one group of workers of a fixed size."""
    count = nodes or cluster.nodes
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": templates.head(pods, config_map),
        },
        "workerGroupSpecs": [
            {
                "groupName": WORKERS,
                "replicas": count,
                "minReplicas": count,
                "maxReplicas": count,
                "rayStartParams": _ray_start(cluster, pods),
                "template": templates.worker(pods, cluster, config_map, imex),
            }
        ],
    }


def _ray_start(cluster: ClusterConfig, pods: KubernetesConfig) -> dict[str, str]:
    """Logical resources: KubeRay takes them from the limits, and Ray knows the card."""
    shown = {"num-cpus": str(pods.node_cpus)}
    if cluster.gpus_per_node:
        shown["num-gpus"] = str(cluster.gpus_per_node)
    return shown


def within_cluster(config: Config) -> Config:
    """The configuration as the pods see it: their Ray, the shared storage, the tracking server."""
    pods = pods_of(config)
    kind = config.manifest.kind
    cluster, tracking = config.cluster, config.tracking
    if kind == "eval":
        cluster = dataclasses.replace(
            cluster,
            nodes=1,
            workers=cluster.workers // cluster.nodes,
            min_workers=None,
            shard=1,
        )
    if "@" in (tracking.uri or ""):
        raise ConfigError(
            "tracking.uri: a ConfigMap would show its password; name the address alone, and the "
            "Secret with user and password by cluster.kubernetes.tracking_secret"
        )
    if tracking.uri is None and not tracking.offline:
        uri = f"http://mlflow.{pods.namespace}.svc:5000"
        tracking = dataclasses.replace(tracking, uri=uri)
    inside = dataclasses.replace(
        config,
        name=run_name(config),
        root=f"{pods.storage_path}/runs",
        stages=STAGES[kind],
        cluster=dataclasses.replace(cluster, address="auto"),
        tracking=tracking,
        resume=False,
    )
    return from_dict(inside.to_dict())  # as the pods will read it


def run_name(config: Config) -> str:
    """The run's own name, or one that the same overrides always give."""
    return config.name or config.experiment or config.precision.recipe


def job_name(config: Config) -> str:
    """A name that Kubernetes takes: of a job of this kind on this run.

    Raises `ConfigError` where the run's name does not make one.
    """
    run = run_name(config)
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not plain:
        raise ConfigError(f"name={run}: Kubernetes' names need letters or digits; choose another")
    name = f"{config.manifest.kind}-{plain}"
    if len(name) > NAME_LENGTH:
        raise ConfigError(
            f"name={run}: it makes a job's name of {len(name)} letters, {name}; take at most "
            f"{NAME_LENGTH - len(name) + len(run)} with name=..."
        )
    return name


def pods_of(config: Config) -> KubernetesConfig:
    """The `cluster.kubernetes` section. Raises `ConfigError` where there is none."""
    if config.cluster.kubernetes is None:
        raise ConfigError(
            "cluster.kubernetes: this cluster has no pods; choose one that has: "
            "cluster=kind, gb200, gb300, b200, h100 or h200"
        )
    pods = config.cluster.kubernetes
    _check_pods(pods)
    if pods.grace_seconds <= templates.STOP_MARGIN:
        raise ConfigError(
            f"cluster.kubernetes.grace_seconds={pods.grace_seconds}: a step and a checkpoint have "
            f"to fit in, and {templates.STOP_MARGIN} s more"
        )
    per_node = config.cluster.workers // config.cluster.nodes
    if per_node * config.cluster.cpus_per_worker > pods.node_cpus:
        raise ConfigError(
            f"cluster.kubernetes.node_cpus={pods.node_cpus}: {per_node} workers of "
            f"{config.cluster.cpus_per_worker:g} CPUs run on each node; raise it, or lower "
            "cluster.cpus_per_worker"
        )
    if config.manifest.kind == "cluster" and pods.priority_class:
        return dataclasses.replace(pods, priority_class="interactive")
    return pods


def _check_pods(pods: KubernetesConfig) -> None:
    """What Kubernetes would refuse, or take and never start. Raises `ConfigError`."""
    label, quantity = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", r"[1-9][0-9]*([kMGTP]i?|Ki)?"
    forms = {
        "image": (r"\S+", "an image's name"),
        "node_memory": (quantity, "an amount as 128Gi"),
        "head_memory": (quantity, "an amount as 128Gi"),
        "storage_path": (r"/\S+", "an absolute path"),
        **dict.fromkeys(
            (
                "namespace",
                "storage_claim",
                "queue",
                "priority_class",
                "tracking_secret",
                "env_secret",
            ),
            (label, "lowercase letters, digits and '-'"),
        ),
    }
    for key, (form, said) in forms.items():
        value = getattr(pods, key)
        if value is not None and not re.fullmatch(form, value):
            raise ConfigError(f"cluster.kubernetes.{key}={value}: give {said}")
    counts = {"node_cpus": 1, "head_cpus": 1, "retries": 0, "deadline_hours": 1, "wait_seconds": 1}
    for key, least in counts.items():
        if getattr(pods, key) < least:
            raise ConfigError(f"cluster.kubernetes.{key}={getattr(pods, key)}: at least {least}")


def _metadata(name: str, pods: KubernetesConfig, labels: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "namespace": pods.namespace, "labels": labels}


def _compute_domain(
    name: str, pods: KubernetesConfig, labels: dict[str, str], imex: str
) -> dict[str, Any]:
    """NVLink across the job's nodes: IMEX channels, handed out by NVIDIA's DRA driver."""
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": _metadata(name, pods, labels),
        "spec": {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": imex}}},
    }


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """The objects as one YAML stream, without anchors."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    text = yaml.dump_all(objects, Dumper=Plain, sort_keys=False, width=100)
    assert isinstance(text, str)
    return text
