"""Rendered overlays, each rendered once, and every component on top of one of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.k8s.deployed import K8S
from tests.k8s.kustomize import Document, render

COMPONENTS = ("pod-monitor", "head-fault-tolerance", "ingress", "new-cluster-upgrade", "tracing")
"""Those that an overlay of the user's may add; ``gpu`` is in the overlays themselves."""


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Document]]:
    """Answers fresh copies of the documents of an overlay, by its name, or of ``everything``."""

    @cache
    def once(name: str) -> list[Document]:
        if name == "everything":
            return render(write_overlay(tmp_path_factory.mktemp("everything"), "autoscale", COMPONENTS))
        return render(K8S / "overlays" / name)

    return lambda name: copy.deepcopy(once(name))


def write_overlay(folder: Path, overlay: str, components: tuple[str, ...]) -> Path:
    """An overlay as users write them: one of ours, with components on top."""
    to = os.path.relpath(K8S, folder.resolve())
    lines = [
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        "namespace: headroom",
        "resources:",
        f"  - {to}/overlays/{overlay}",
        "components:",
        *(f"  - {to}/components/{name}" for name in components),
        f"  - {to}/../dashboards",
    ]
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return folder
