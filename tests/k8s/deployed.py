"""What rendered documents deploy, in the terms that the checks speak of: pods, environment, Serve configuration."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from serve_app.config import AppArgs
from tests.k8s.kustomize import Document

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("single", "autoscale", "shared-host", "demo-cpu")
GPU = "nvidia.com/gpu"
UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: object) -> float:
    """A Kubernetes quantity as a number; 0 for none."""
    found = re.fullmatch(r"([0-9.]+)(\w*)", str(text if text is not None else 0))
    if found is None or found[2] not in UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Pods:
    """The head, or a group of workers: ``least`` to ``most`` pods of a template. ``start``: Ray's parameters."""

    name: str
    template: Document
    start: Mapping[str, str]
    least: int = 1
    most: int = 1

    @property
    def is_head(self) -> bool:
        return self.name == "head"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"].get("labels", {}))

    @property
    def spec(self) -> Document:
        spec: Document = self.template["spec"]
        return spec

    @property
    def container(self) -> Document:
        """Ray's."""
        container: Document = self.spec["containers"][0]
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def num_gpus(self) -> int:
        return int(quantity(self.container["resources"].get("limits", {}).get(GPU)))

    def stated(self, name: str) -> float:
        """A quantity of the template's annotations."""
        return quantity(self.template["metadata"].get("annotations", {}).get(f"headroom/{name}"))

    def mounted(self, path: str) -> Document | None:
        """The volume that holds a path; None where it lies in the image."""
        found = [
            mount
            for mount in self.container.get("volumeMounts", [])
            if path == mount["mountPath"] or path.startswith(mount["mountPath"] + "/")
        ]
        names = {mount["name"] for mount in found}
        volumes: list[Document] = [entry for entry in self.spec.get("volumes", []) if entry["name"] in names]
        return volumes[0] if volumes else None


class Deployed:
    """Rendered documents and what they come to."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        [self.service] = self.of_kind("RayService")

    def of_kind(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    @property
    def cluster(self) -> Document:
        cluster: Document = self.service["spec"]["rayClusterConfig"]
        return cluster

    @cached_property
    def pods(self) -> list[Pods]:
        head = self.cluster["headGroupSpec"]
        groups = self.cluster["workerGroupSpecs"]
        return [
            Pods("head", head["template"], head["rayStartParams"]),
            *(
                Pods(e["groupName"], e["template"], e["rayStartParams"], e["minReplicas"], e["maxReplicas"])
                for e in groups
            ),
        ]

    @cached_property
    def config(self) -> Any:
        """The Serve configuration."""
        return yaml.safe_load(self.service["spec"]["serveConfigV2"])

    @cached_property
    def args(self) -> AppArgs:
        """The application's options, by the application's own model of them."""
        return AppArgs.model_validate(self.config["applications"][0]["args"])

    @cached_property
    def environment(self) -> dict[str, str]:
        """What every container of Ray's has from the shared ConfigMap."""
        found: dict[str, str] = {}
        for document in self.of_kind("ConfigMap"):
            if document["metadata"]["name"] == "headroom-env":
                found |= document["data"]
        return found

    def templates(self) -> Iterator[tuple[str, Document]]:
        """Every pod template, Ray's and others'."""
        for pods in self.pods:
            yield pods.name, pods.template
        for document in self.documents:
            if document["kind"] in ("StatefulSet", "Job", "Deployment"):
                yield document["metadata"]["name"], document["spec"]["template"]

    def selected(self, labels: Mapping[str, str]) -> list[tuple[str, Document]]:
        """The templates whose pods have these labels."""
        return [
            (name, template)
            for name, template in self.templates()
            if labels.items() <= template["metadata"].get("labels", {}).items()
        ]


def locked(package: str) -> str:
    """The version of a package in the lock file, however its name is written."""
    lock = (ROOT / ".ci" / "requirements.lock").read_text()
    name = re.sub(r"[-_.]", "[-_.]", package)
    found = re.search(rf"^{name}==(.+)$", lock, re.MULTILINE | re.IGNORECASE)
    assert found is not None, package
    return found[1]


def project() -> dict[str, Any]:
    """The project's own description."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found
