"""All checks of rendered documents: by schema, of the pods, of how they fit together."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.k8s import pod_checks, wiring_checks
from tests.k8s.deployed import ROOT, Deployed
from tests.k8s.kustomize import Document

KUBERNETES = "1.34"
CRD = ROOT.parent / "shared" / "k8s" / "ray.io_rayservices.yaml.xz"
"""KubeRay's definition of a RayService, where a copy lies beside the project."""
CHECKS = (
    pod_checks.images,
    pod_checks.resources,
    pod_checks.memory,
    pod_checks.probes,
    pod_checks.grace_periods,
    pod_checks.environment,
    pod_checks.security,
    wiring_checks.selectors,
    wiring_checks.ports,
    wiring_checks.serve_config,
    wiring_checks.capacity,
    wiring_checks.budgets,
    wiring_checks.upgrades,
    wiring_checks.network,
)
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule"}
"""Kinds that Kubernetes itself does not define."""


def problems(documents: list[Document]) -> list[str]:
    """What is wrong with rendered documents, in sentences."""
    deployed = Deployed(documents)
    # Without sound documents and options there is nothing for the other checks to look at.
    found = [*schema_problems(documents)] or [*wiring_checks.serve_config(deployed)]
    if found:
        return found
    for check in CHECKS:
        found += check(deployed)
    return found


def schema_problems(documents: list[Document]) -> Iterator[str]:
    """What Kubernetes would refuse, also in templates of pods, and KubeRay's definition where there is one."""
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] not in CUSTOM:
            yield from _of_kubernetes(document, name)
        if document["kind"] == "RayService":
            cluster = document["spec"]["rayClusterConfig"]
            for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
                pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
                yield from _of_kubernetes(pod, f"{name}, pods of {group.get('groupName', 'the head')}")
            if CRD.is_file():
                errors = rayservice_schema().iter_errors(document)
                yield from (f"{name}: {e.json_path}: {e.message[:200]}" for e in errors)


def _of_kubernetes(document: Document, name: str) -> Iterator[str]:
    found = _kubernetes_says(json.dumps(document))
    if found:
        yield f"{name}: {found}"


@cache
def _kubernetes_says(text: str) -> str:
    """What Kubernetes' own schema has against a document; the library reads that schema anew each time."""
    document = json.loads(text)
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return f"there is no {document['apiVersion']} {document['kind']} in Kubernetes {KUBERNETES}"
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message[:200]}"
    return ""


@cache
def rayservice_schema() -> jsonschema.Draft202012Validator:
    """KubeRay's definition as a JSON schema."""
    text = lzma.decompress(Path(CRD).read_bytes())
    definition = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [entry for entry in definition["spec"]["versions"] if entry["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    return jsonschema.Draft202012Validator(_closed(schema, is_top=True))


def _closed(schema: Any, is_top: bool = False) -> Any:
    """As the API server reads it: unknown fields refused, defaults filled in before `required` is looked at."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items() if key not in ("properties", "format")}
    if "properties" in schema:
        found["properties"] = {key: _closed(value) for key, value in schema["properties"].items()}
        if is_top:
            found["properties"]["metadata"] = {"type": "object"}
        elif not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
        filled = {key for key, value in schema["properties"].items() if "default" in value}
        found["required"] = [key for key in schema.get("required", []) if key not in filled]
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found
