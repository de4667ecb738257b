"""Rules of safety that every pod keeps, and what nothing here may do."""

from __future__ import annotations

from typing import Any

import yaml

from tests.k8s.objects import K8S, KINDS, OVERLAYS, files, pods, rendered


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return pod["spec"]["containers"] + pod["spec"].get("initContainers", [])


def test_no_pod_runs_as_root_or_shares_the_host() -> None:
    for pod in pods().values():
        spec = pod["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["automountServiceAccountToken"] is False
        assert spec["serviceAccountName"] != "default"
        assert not any("hostPath" in volume for volume in spec["volumes"])


def test_no_container_can_gain_rights_or_write_its_image() -> None:
    for pod in pods().values():
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security.get("privileged")
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/tmp" in mounts, "with a read-only root something must be writable"


def test_every_container_has_limits_and_a_pinned_image() -> None:
    for pod in pods().values():
        for container in containers(pod):
            limits, requests = (container["resources"][key] for key in ("limits", "requests"))
            assert {"cpu", "memory"} <= set(limits)
            assert requests["memory"] == limits["memory"]
            tag = container["image"].rpartition(":")[2]
            assert "/" not in tag, "no tag"
            assert tag != "latest"
            assert not any("hostPort" in port for port in container.get("ports", []))


def test_every_service_is_probed_and_ends_in_order() -> None:
    for pod in pods().values():
        spec = pod["spec"]
        assert spec["terminationGracePeriodSeconds"] >= 30
        assert spec["priorityClassName"] in {"tracking", "training", "interactive"}
        if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "submitter":
            continue
        for container in containers(pod):
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


def test_ray_pods_write_a_checkpoint_before_they_go() -> None:
    for name, pod in pods().items():
        if not name.startswith("Ray") or name.endswith("submitter"):
            continue
        (container,) = containers(pod)
        command = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert "pipeline.entry" in command
        waits = int(command.rpartition(" ")[2])
        assert 0 < waits < pod["spec"]["terminationGracePeriodSeconds"]


def test_secrets_come_from_secrets() -> None:
    for item in files():
        assert item["kind"] != "Secret"
    words = ("PASSWORD", "SECRET", "TOKEN", "ACCESS_KEY")
    for name, pod in pods().items():
        for container in containers(pod):
            for variable in container.get("env", []):
                if any(word in variable["name"] for word in words):
                    assert "secretKeyRef" in variable["valueFrom"], (name, variable["name"])


def test_nothing_is_exposed() -> None:
    for item in files():
        assert item["kind"] not in {"Ingress", "Gateway", "HTTPRoute", "ClusterRoleBinding"}
        if item["kind"] == "Service":
            assert item["spec"].get("type", "ClusterIP") == "ClusterIP"
    for overlay in OVERLAYS:
        for kind in KINDS:
            head = rendered(overlay, kind)[-1]["spec"]
            head = head.get("rayClusterSpec", head)["headGroupSpec"]
            assert head["serviceType"] == "ClusterIP"
            assert not head.get("enableIngress")


def test_a_policy_denies_all_and_each_pod_is_admitted_by_one() -> None:
    policies = [item for item in files() if item["kind"] == "NetworkPolicy"]
    (deny,) = (item for item in policies if item["metadata"]["name"] == "nothing-else")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            assert rule.get("from"), f"{policy['metadata']['name']} admits everyone"
            assert not any("ipBlock" in source for source in rule["from"])
    selected = [policy["spec"]["podSelector"].get("matchLabels", {}) for policy in policies]
    for name, pod in pods().items():
        labels = dict(pod["metadata"]["labels"])
        if name.startswith("Ray") and not name.endswith("submitter"):
            labels["ray.io/is-ray-node"] = "yes"  # the operator adds it
        assert any(wanted and wanted.items() <= labels.items() for wanted in selected), name


def test_the_namespace_enforces_the_restricted_standard() -> None:
    (namespace,) = (item for item in files() if item["kind"] == "Namespace")
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_mlflow_asks_who_and_checks_hosts() -> None:
    (pod,) = (pod for name, pod in pods().items() if name == "Deployment/mlflow")
    (container,) = containers(pod)
    arguments = dict(item[2:].split("=", 1) for item in container["args"])
    assert arguments["app-name"] == "basic-auth"
    hosts = arguments["allowed-hosts"].split(",")
    assert "*" not in hosts
    assert {"mlflow.nvfp4-pretrain.svc", "mlflow.nvfp4-pretrain.svc:5000"} <= set(hosts)
    for policy in yaml.safe_load_all((K8S / "base" / "network.yaml").read_text()):
        if policy["metadata"]["name"] == "mlflow":
            assert policy["spec"]["ingress"][0]["from"][0]["podSelector"]
