"""The manual's section on Kubernetes names files and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.k8s.conftest import COMPONENTS
from tests.k8s.deployed import K8S, ROOT
from tests.k8s.kustomize import Document, each_container, render

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


def as_in_the_manual(folder: Path, **lines: str) -> list[Document]:
    """What the manual's own overlay deploys, with these of its lines written otherwise; "" leaves one out."""
    [text] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    for name in ("k8s", "dashboards"):
        (folder / name).symlink_to(ROOT / name)
    mine = folder / "mine"
    mine.mkdir()
    for key, value in lines.items():
        text = re.sub(rf"^{key}: .*\n", f"{key}: {value}\n" if value else "", text, flags=re.MULTILINE)
    (mine / "kustomization.yaml").write_text(text)
    return render(mine)


def check_placed(documents: list[Document]) -> None:
    """All lies in the service's namespace, and no image of ours is looked for anywhere but in the registry."""
    outside = [d["metadata"]["name"] for d in documents if d["metadata"].get("namespace") != "headroom"]
    assert outside == []
    images: set[str] = set()
    each_container(documents, lambda container: images.add(container["image"]))
    assert {image for image in images if "headroom" in image} == {"REGISTRY/headroom:0.1.0"}


def test_the_overlay_of_the_manual_puts_everything_into_one_namespace(tmp_path: Path) -> None:
    check_placed(as_in_the_manual(tmp_path))


def test_so_it_does_with_every_component(tmp_path: Path) -> None:
    every = ", ".join(f"../k8s/components/{name}" for name in COMPONENTS)
    check_placed(as_in_the_manual(tmp_path, components=f"[{every}, ../dashboards]"))


def test_the_job_that_fetches_a_model_has_the_image_of_the_registry(tmp_path: Path) -> None:
    check_placed(as_in_the_manual(tmp_path, resources="[../k8s/model]", components=""))
