"""The pods of a Ray cluster: head, workers and the one that submits a job, with their limits.

All are alike in what keeps them harmless: no root, no writable image, no capabilities, no token of
Kubernetes' own; only `/tmp` and the shared storage can be written.
"""

from __future__ import annotations

from typing import Any

from pipeline.config import ClusterConfig, KubernetesConfig

PART_OF = {"app.kubernetes.io/part-of": "nvfp4-pretrain"}
CONFIG_FOLDER = "/etc/nvfp4-pretrain"
CONFIG_FILE = f"{CONFIG_FOLDER}/config.yaml"
ENTRY = "python -m pipeline.entry"
STOP_MARGIN = 60  # seconds of the grace period that are left to Ray's own end
HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
AGENT_PORT = 52365  # of every node's dashboard agent

POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def head(pods: KubernetesConfig, config_map: str) -> dict[str, Any]:
    """The head: Ray's control, Ray Train's controller and the command. It computes nothing."""
    resources = {"cpu": str(pods.head_cpus), "memory": pods.head_memory}
    container = _container(pods, "ray-head", resources)
    container["ports"] = [
        {"name": name, "containerPort": port} for name, port in HEAD_PORTS.items()
    ]
    container |= _probes(HEAD_PORTS["gcs-server"])
    # How long `ray job stop` leaves the command between SIGTERM and SIGKILL.
    seconds = str(pods.grace_seconds - STOP_MARGIN)
    container["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": seconds})
    return _template(pods, container, config_map, "head", pods.head_arch)


def worker(
    pods: KubernetesConfig, cluster: ClusterConfig, config_map: str, imex: str | None
) -> dict[str, Any]:
    """A node's one Ray pod, with all of its GPUs.

    imex: the resource claim template of the job's NVLink domain, where there is one.
    """
    resources = {"cpu": str(pods.node_cpus), "memory": pods.node_memory}
    if cluster.gpus_per_node:
        resources["nvidia.com/gpu"] = str(cluster.gpus_per_node)
    container = _container(pods, "ray-worker", resources)
    container |= _probes(AGENT_PORT)
    template = _template(pods, container, config_map, "worker", pods.arch)
    spec = template["spec"]
    if cluster.gpus_per_node:
        spec["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            *_tolerated_arch(pods.arch),
        ]
    if imex:
        spec["resourceClaims"] = [{"name": "imex", "resourceClaimTemplateName": imex}]
        container["resources"]["claims"] = [{"name": "imex"}]
    if pods.compute_domain and pods.queue:  # racks' flavor admits only who asks for a place
        level = "nvidia.com/gpu.clique" if imex else "kubernetes.io/hostname"
        template["metadata"]["annotations"] = {"kueue.x-k8s.io/podset-preferred-topology": level}
    return template


def submitter(pods: KubernetesConfig, job: str) -> dict[str, Any]:
    """The pod in which KubeRay hands the job over and follows its log."""
    container = _container(pods, "submitter", {"cpu": "1", "memory": "2Gi"})
    container.pop("lifecycle")
    container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    return {
        "metadata": {"labels": _labels(job, "submitter")},
        "spec": _spec(pods, container, pods.head_arch)
        | {"volumes": [_scratch()], "terminationGracePeriodSeconds": 30},
    }


def _container(pods: KubernetesConfig, name: str, resources: dict[str, str]) -> dict[str, Any]:
    seconds = pods.grace_seconds - STOP_MARGIN
    stop = f"{ENTRY} {CONFIG_FILE} --stop --seconds {seconds}"
    return {
        "name": name,
        "image": pods.image,
        "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "env": [
            {"name": "HOME", "value": "/tmp/home"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            {"name": "RAY_TRAIN_ENABLE_STATE_TRACKING", "value": "0"},
            {"name": "MLFLOW_DISABLE_TELEMETRY", "value": "true"},
            {"name": "HF_HUB_OFFLINE", "value": "0" if pods.hub else "1"},
            *_credentials(pods),
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in (pods.env_secret,) if name],
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "storage", "mountPath": pods.storage_path},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "securityContext": CONTAINER_SECURITY,
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", stop]}}},
    }


def _credentials(pods: KubernetesConfig) -> list[dict[str, Any]]:
    """What MLflow's client needs, from a Secret."""
    return [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": pods.tracking_secret, "key": key}},
        }
        for name, key in (
            ("MLFLOW_TRACKING_USERNAME", "username"),
            ("MLFLOW_TRACKING_PASSWORD", "password"),
        )
        if pods.tracking_secret
    ]


def _template(
    pods: KubernetesConfig, container: dict[str, Any], config_map: str, part: str, arch: str
) -> dict[str, Any]:
    volumes = [
        {"name": "config", "configMap": {"name": config_map}},
        {"name": "storage", "persistentVolumeClaim": {"claimName": pods.storage_claim}},
        _scratch(),
    ]
    return {
        "metadata": {"labels": _labels(config_map, part)},
        "spec": _spec(pods, container, arch) | {"volumes": volumes},
    }


def _labels(job: str, part: str) -> dict[str, str]:
    """KubeRay gives pods no label of their job's: `status` finds them by these."""
    return PART_OF | {
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": part,
    }


def _spec(pods: KubernetesConfig, container: dict[str, Any], arch: str) -> dict[str, Any]:
    spec = {
        "serviceAccountName": "training",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace_seconds,
        "securityContext": POD_SECURITY,
        "nodeSelector": {"kubernetes.io/arch": arch},
        "containers": [container],
    }
    if tolerations := _tolerated_arch(arch):
        spec["tolerations"] = tolerations
    if pods.priority_class:
        spec["priorityClassName"] = pods.priority_class
    return spec


def _tolerated_arch(arch: str) -> list[dict[str, str]]:
    key = {"key": "kubernetes.io/arch", "operator": "Equal", "value": arch}
    return [key | {"effect": "NoSchedule"}] if arch != "amd64" else []


def _scratch() -> dict[str, Any]:
    return {"name": "tmp", "emptyDir": {"sizeLimit": "20Gi"}}


def _probes(port: int) -> dict[str, Any]:
    """Whether the port answers. A node that hangs in a step is the watchdog's to find."""
    probe = {"tcpSocket": {"port": port}, "periodSeconds": 10, "timeoutSeconds": 5}
    return {
        "startupProbe": probe | {"failureThreshold": 60},
        "readinessProbe": probe | {"failureThreshold": 6},
        "livenessProbe": probe | {"failureThreshold": 30},
    }
