"""All objects that the project gives to Kubernetes, and what may be said of each.

`validate` is strict: an unknown field is refused, and so is a kind that neither Kubernetes,
KubeRay's CRDs nor a schema in `schemas/` describes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from pipeline.kubernetes.manifest import manifest
from tests.pipeline.test_config import composed

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
KUBERNETES_VERSION = "1.34"  # the oldest that is supported: DRA is stable from there on
OVERLAYS = {
    "kind": ("cluster=kind", "name=demo"),
    "gb200": ("+experiment=12b_nvfp4", "cluster=gb200"),
    "gb300": ("+experiment=12b_nvfp4", "cluster=gb300"),
    "h100": ("+experiment=8b_bf16", "cluster=h100"),
}
KINDS = ("train", "eval", "cluster")
Object = dict[str, Any]


@cache
def rendered(overlay: str, kind: str, *overrides: str) -> list[Object]:
    """A job's objects, as `pipeline manifest` makes them."""
    config = composed(*OVERLAYS[overlay], f"manifest.kind={kind}", *overrides)
    return yaml.safe_load(yaml.safe_dump(manifest(config)))


@cache
def pods() -> dict[str, Object]:
    """Every pod template of every file and job, by where it stands."""
    jobs = [item for overlay in OVERLAYS for kind in KINDS for item in rendered(overlay, kind)]
    return dict(pair for item in [*files(), *jobs] for pair in pod_templates(item))


def files() -> Iterator[Object]:
    """Every object in k8s/, as its file has it."""
    for path in sorted(K8S.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from (item for item in yaml.safe_load_all(path.read_text()) if item)


def pod_templates(item: Object) -> Iterator[tuple[str, Object]]:
    """Each pod template in an object, with where it stands: (path, template)."""
    kind, spec = item["kind"], item.get("spec", {})
    name = f"{kind}/{item['metadata']['name']}"
    if kind in {"Deployment", "StatefulSet"}:
        yield name, spec["template"]
    if kind == "RayJob":
        yield f"{name}/submitter", spec["submitterPodTemplate"]
        spec = spec["rayClusterSpec"]
    if kind in {"RayJob", "RayCluster"}:
        yield f"{name}/head", spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            yield f"{name}/{group['groupName']}", group["template"]


def validate(item: Object, shared: Path) -> None:
    """Raises where an object is not what its kind's schema says, or its kind has none."""
    kind, version = item["kind"], item["apiVersion"]
    if version == "ray.io/v1":
        _checked(ray_validator(shared, kind), item)
    elif kind in own_schemas():
        schema = own_schemas()[kind]
        assert version == schema["apiVersion"], version
        assert ("namespace" in item["metadata"]) <= schema["namespaced"], kind
        _checked(Draft202012Validator(schema["spec"]), item["spec"])
    elif "." in version.split("/")[0] and not version.split("/")[0].endswith("k8s.io"):
        raise LookupError(f"{version} {kind}: no schema in tests/k8s/schemas")
    else:
        kubernetes_validate.validate(item, KUBERNETES_VERSION, strict=True)


def _checked(validator: Draft202012Validator, value: Any) -> None:
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]
    if errors:
        raise ValueError("; ".join(errors[:5]))


@cache
def own_schemas() -> dict[str, Any]:
    """Kinds of neither Kubernetes nor KubeRay."""
    found: dict[str, Any] = {}
    for path in (Path(__file__).parent / "schemas").glob("*.yaml"):
        found |= yaml.safe_load(path.read_text())
    return found


@cache
def ray_validator(shared: Path, kind: str) -> Draft202012Validator:
    """KubeRay's schema of a kind from its CRD, made strict."""
    file = shared / "schemas" / f"kuberay_{kind.lower()}s.yaml"
    crd = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (schema,) = (
        version["schema"]["openAPIV3Schema"]
        for version in crd["spec"]["versions"]
        if version["name"] == "v1"
    )
    schema = copy.deepcopy(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    """No unknown fields; a field with a default is optional; an int-or-string is either."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    properties = made.get("properties")
    if isinstance(properties, dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
        required = [
            name
            for name in made.get("required", [])
            if not (isinstance(properties.get(name), dict) and "default" in properties[name])
        ]
        made["required"] = required
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
        made.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    return made
