"""The manual's section on Kubernetes names files and options that exist."""

from __future__ import annotations

import re

import pytest

from tests.k8s.deployed import K8S, ROOT

TEXT = (ROOT / "docs" / "operating.md").read_text().split("\n## On Kubernetes\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:\.\./)?(k8s/[\w./-]*\w|dashboards)\b", TEXT))))
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_overlay_and_component_is_named() -> None:
    for folder in ("overlays", "components"):
        for path in (K8S / folder).iterdir():
            assert f"`{path.name}`" in TEXT or path.name == "gpu"


def test_the_commands_are_five() -> None:
    assert len(re.findall(r"^    (?:docker|helm|kubectl) ", TEXT, re.MULTILINE)) == 5
