"""Every object that the project gives to Kubernetes is valid, strictly, and says what is meant."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import ConfigError, from_dict
from pipeline.kubernetes.manifest import manifest
from tests.k8s.objects import K8S, KINDS, OVERLAYS, files, rendered, validate
from tests.pipeline.test_config import composed

EVERY = [(overlay, kind) for overlay in OVERLAYS for kind in KINDS]


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (item for item in objects if item["kind"] == kind)
    return found


@pytest.mark.parametrize(("overlay", "kind"), EVERY)
def test_what_manifest_renders_is_valid(shared: Path, overlay: str, kind: str) -> None:
    objects = rendered(overlay, kind)
    assert {"ConfigMap", "RayCluster" if kind == "cluster" else "RayJob"} <= {
        item["kind"] for item in objects
    }
    for item in objects:
        validate(item, shared)


def test_every_file_is_valid(shared: Path) -> None:
    for item in files():
        validate(item, shared)


@pytest.mark.parametrize("overlay", sorted(OVERLAYS))
def test_every_overlay_builds_into_valid_objects(overlay: str, shared: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, whose kustomize builds overlays, is not installed")
    command = [kubectl, "kustomize", str(K8S / "overlays" / overlay)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert not built.returncode, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    for item in objects:
        validate(item, shared)
    kinds = {item["kind"] for item in objects}
    assert {"NetworkPolicy", "PodDisruptionBudget", "PriorityClass", "StatefulSet"} <= kinds
    assert ("ClusterQueue" in kinds) == (overlay != "kind")
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for kind in KINDS:  # what a job refers to is there
        for item in rendered(overlay, kind):
            for wanted in references(item):
                assert wanted in names, wanted


def references(item: dict[str, Any]) -> set[tuple[str, str]]:
    """What an object needs of the platform, as (kind, name); Secrets are made by hand."""
    text, found = yaml.safe_dump(item), set()
    for line in text.splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(": ")
        kinds = {
            "claimName": "PersistentVolumeClaim",
            "priorityClassName": "PriorityClass",
            "serviceAccountName": "ServiceAccount",
            "kueue.x-k8s.io/queue-name": "LocalQueue",
        }
        if key in kinds:
            found.add((kinds[key], value))
    return found


@pytest.mark.parametrize("overlay", sorted(OVERLAYS))
def test_overlays_name_files_that_are_there(overlay: str) -> None:
    folders = [K8S / "overlays" / overlay]
    while folders:
        folder = folders.pop()
        known = yaml.safe_load((folder / "kustomization.yaml").read_text())
        listed = known.get("resources", []) + known.get("components", [])
        for path in (folder / name for name in listed):
            assert path.exists(), path
            if path.is_dir():
                folders.append(path)
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files <= set(listed), f"{folder}: not in its kustomization"


MISTAKES = {
    "an unknown field": lambda spec: spec["rayClusterSpec"].update(rayVersoin="2"),
    "a misspelt minReplicas": lambda spec: workers(spec).update(minReplica=1),
    "replicas in words": lambda spec: workers(spec).update(replicas="two"),
    "a number among rayStartParams": lambda spec: workers(spec)["rayStartParams"].update(cpus=1),
    "no head": lambda spec: spec["rayClusterSpec"].pop("headGroupSpec"),
    "an unknown field of a pod": lambda spec: workers(spec)["template"]["spec"].update(x=1),
}


def workers(spec: dict[str, Any]) -> dict[str, Any]:
    return spec["rayClusterSpec"]["workerGroupSpecs"][0]


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_the_validation_refuses(mistake: str, shared: Path) -> None:
    job = copy.deepcopy(of_kind(rendered("gb200", "train"), "RayJob"))
    MISTAKES[mistake](job["spec"])
    with pytest.raises(ValueError, match=r"\$"):
        validate(job, shared)


def test_an_unknown_kind_or_core_field_is_refused(shared: Path) -> None:
    with pytest.raises(LookupError, match="no schema"):
        validate({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {}}, shared)
    job = of_kind(rendered("kind", "train"), "ConfigMap")
    with pytest.raises(Exception, match="dta"):
        validate(job | {"dta": {}}, shared)
    queue = next(item for item in files() if item["kind"] == "LocalQueue")
    with pytest.raises(ValueError, match="clusterQue"):
        validate(queue | {"spec": {"clusterQue": "x"}}, shared)


# ---- What schemas do not say ---------------------------------------------------------------------


@pytest.mark.parametrize("overlay", ["gb200", "h100"])
def test_nodes_gpus_and_configuration_agree(overlay: str) -> None:
    objects = rendered(overlay, "train", "cluster.nodes=5")
    job, data = of_kind(objects, "RayJob")["spec"], of_kind(objects, "ConfigMap")["data"]
    config = from_dict(yaml.safe_load(data["config.yaml"]))
    group = workers(job)
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 5
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert config.cluster.workers * config.cluster.gpus_per_worker == 5 * gpus
    assert group["rayStartParams"]["num-gpus"] == str(gpus)
    assert config.cluster.address == "auto"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.root.startswith(mounts["storage"])
    assert f"{mounts['config']}/config.yaml" in job["entrypoint"]
    assert config.name
    assert str(config.tracking.uri).startswith("http://mlflow.")


@pytest.mark.parametrize(("overlay", "kind"), [pair for pair in EVERY if pair[1] != "cluster"])
def test_a_job_is_retried_by_kuberay_alone_and_ends(overlay: str, kind: str) -> None:
    job = of_kind(rendered(overlay, kind), "RayJob")
    spec = job["spec"]
    assert len(job["metadata"]["name"]) <= 47
    assert spec["submissionMode"] == "K8sJobMode"  # others end with the head's load
    assert spec["submitterConfig"]["backoffLimit"] == 0  # else the job is submitted again
    assert spec["backoffLimit"] > 0  # the head was lost: again, from the checkpoint
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["shutdownAfterJobFinishes"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert head["serviceType"] == "ClusterIP"
    (container,) = head["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    queued = "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    assert queued == (overlay != "kind")


def test_racks_get_an_imex_channel_and_others_do_not() -> None:
    objects = rendered("gb200", "train")
    domain = of_kind(objects, "ComputeDomain")
    claim = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    spec = workers(of_kind(objects, "RayJob")["spec"])["template"]["spec"]
    assert spec["resourceClaims"] == [{"name": "imex", "resourceClaimTemplateName": claim}]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "imex"}]
    assert spec["nodeSelector"]["kubernetes.io/arch"] == "arm64"
    for other in (rendered("h100", "train"), rendered("gb200", "train", "cluster.nodes=1")):
        assert "ComputeDomain" not in {item["kind"] for item in other}


@pytest.mark.parametrize(
    ("overlay", "kind", "overrides", "level"),
    [
        ("gb200", "train", (), "nvidia.com/gpu.clique"),
        ("gb200", "train", ("cluster.nodes=1",), "kubernetes.io/hostname"),
        ("gb300", "eval", (), "kubernetes.io/hostname"),
        ("gb200", "train", ("+cluster.kubernetes.queue=null",), None),
        ("h100", "train", (), None),
    ],
)
def test_a_flavor_with_a_topology_admits_the_racks_workers_and_others_have_none(
    overlay: str, kind: str, overrides: tuple[str, ...], level: str | None
) -> None:
    job = of_kind(rendered(overlay, kind, *overrides), "RayJob")["spec"]
    notes = workers(job)["template"]["metadata"].get("annotations", {})
    assert notes.get("kueue.x-k8s.io/podset-preferred-topology") == level
    (topology,) = (item for item in files() if item["kind"] == "Topology")
    assert level is None or level in [each["nodeLabel"] for each in topology["spec"]["levels"]]
    patches = yaml.safe_load((K8S / "overlays" / overlay / "kustomization.yaml").read_text())
    removed = "op: remove, path: /spec/topologyName" in str(patches["patches"])
    assert removed == (overlay == "h100")


def test_credentials_come_from_a_secret_and_the_hub_is_asked_only_where_it_may_be() -> None:
    for overrides, secret, offline in (
        ((), [], "1"),
        (
            ("+cluster.kubernetes.env_secret=corpus", "+cluster.kubernetes.hub=true"),
            [{"secretRef": {"name": "corpus"}}],
            "0",
        ),
    ):
        job = of_kind(rendered("gb200", "train", *overrides), "RayJob")["spec"]
        (container,) = workers(job)["template"]["spec"]["containers"]
        assert container["envFrom"] == secret
        assert {"name": "HF_HUB_OFFLINE", "value": offline} in container["env"]


@pytest.mark.parametrize("kind", KINDS)
def test_status_selects_all_pods_of_a_job(kind: str) -> None:
    objects = rendered("gb200", kind)
    body = objects[-1]
    name = body["metadata"]["name"]
    spec = body["spec"] if kind == "cluster" else body["spec"]["rayClusterSpec"]
    templates = [spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]]
    if kind != "cluster":
        templates.append(body["spec"]["submitterPodTemplate"])
    for template in templates:
        assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == name


@pytest.mark.parametrize(
    "overrides", [("cluster.shard=8",), ("cluster.min_workers=32",), ("cluster.nodes=2",)]
)
def test_the_pods_can_read_what_an_evaluation_gives_them(overrides: tuple[str, ...]) -> None:
    data = of_kind(rendered("gb200", "eval", *overrides), "ConfigMap")["data"]
    config = from_dict(yaml.safe_load(data["config.yaml"]))
    assert (config.cluster.nodes, config.cluster.workers) == (1, 4)
    assert config.stages == ("eval", "report")


def test_an_evaluation_takes_one_node_and_runs_on_its_gpu() -> None:
    spec = of_kind(rendered("gb200", "eval"), "RayJob")["spec"]
    assert workers(spec)["replicas"] == 1
    assert spec["entrypointNumGpus"] == 1


def test_what_has_no_pods_or_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.kubernetes"):
        manifest(composed())
    with pytest.raises(ConfigError, match="at most"):
        manifest(composed("cluster=kind", f"name={'long' * 12}"))
    with pytest.raises(ConfigError, match="node_cpus"):
        manifest(composed("cluster=kind", "cluster.cpus_per_worker=3"))
    with pytest.raises(ConfigError, match="letters or digits"):
        manifest(composed("cluster=kind", "name=___"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grace_seconds", "30"),
        ("image", "''"),
        ("node_memory", "lots"),
        ("queue", "Bad_Queue"),
        ("retries", "-1"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        manifest(composed("cluster=kind", f"cluster.kubernetes.{key}={value}"))


def test_a_password_does_not_get_into_the_config_map() -> None:
    with pytest.raises(ConfigError, match=r"^(?!.*hunter2).*tracking_secret"):
        manifest(composed("cluster=kind", "tracking.uri='https://me:hunter2@mlflow.example'"))
