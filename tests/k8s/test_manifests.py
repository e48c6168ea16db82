"""What k8s/ deploys is sound: every overlay, and all components on top of one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.k8s.checks import problems, schema_problems
from tests.k8s.conftest import COMPONENTS, write_overlay
from tests.k8s.deployed import K8S, OVERLAYS, ROOT, Deployed
from tests.k8s.kustomize import Document, KustomizeError, load, render
from worker.advise.__main__ import main as advise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DASHBOARDS = ROOT / "dashboards"
Rendered = Callable[[str], list[Document]]


@pytest.mark.parametrize("name", [*OVERLAYS, "everything"])
def test_what_is_deployed_is_sound(rendered: Rendered, name: str) -> None:
    assert problems(rendered(name)) == []


def test_the_volume_and_the_job_that_fills_it_are_sound() -> None:
    documents = render(K8S / "model")
    assert {document["kind"] for document in documents} == {"PersistentVolumeClaim", "Job"}
    assert [*schema_problems(documents)] == []
    [job] = [document for document in documents if document["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    [mount] = container["volumeMounts"]
    folder = next(entry["value"] for entry in container["env"] if entry["name"] == "FOLDER")
    served = Deployed(render(K8S / "overlays" / "single")).args.model
    assert f"{mount['mountPath']}/{folder}" == served


def test_every_dashboard_is_loaded_by_grafanas_sidecar(rendered: Rendered) -> None:
    [found] = [d for d in rendered("everything") if d["metadata"]["name"] == "headroom-dashboards"]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert set(found["data"]) == {path.name for path in DASHBOARDS.glob("*.json")}
    assert all(json.loads(text)["uid"] for text in found["data"].values())
    # A ConfigMap holds a mebibyte at most, and `kubectl apply` keeps a copy of 256 KiB at most beside it.
    assert sum(len(text.encode()) for text in found["data"].values()) < 200 * 2**10


def test_prometheus_gets_the_alert_rules(rendered: Rendered) -> None:
    [found] = [document for document in rendered("everything") if document["kind"] == "PrometheusRule"]
    assert found["spec"] == yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text())


def test_every_overlay_and_component_is_tested() -> None:
    assert {path.name for path in (K8S / "overlays").iterdir()} == set(OVERLAYS)
    assert {path.name for path in (K8S / "components").iterdir()} == {*COMPONENTS, "gpu"}


@pytest.mark.parametrize("name", ["single", "autoscale", "shared-host"])
def test_memory_is_what_the_advisor_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (K8S / "overlays" / name / "memory.yaml").read_text()
    command = text.splitlines()[1].split("`")[1].removeprefix("python -m worker.advise ")
    assert advise(command.split()) == 0
    assert capsys.readouterr().out == text
    # The advice is for the load that the overlay lets in, of the model that it names.
    args = Deployed(render(K8S / "overlays" / name)).args
    assert args.worker.max_running == int(command.split("--concurrency ")[1].split()[0])
    assert args.name == command.split()[0]
    assert ("--pod-workers" in command) == (args.worker.host_store == "shared")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl where there is one")
@pytest.mark.parametrize("name", [*OVERLAYS, "everything"])
def test_kubectl_renders_the_same(rendered: Rendered, name: str, tmp_path: Path) -> None:
    folder = K8S / "overlays" / name
    if name == "everything":
        folder = write_overlay(tmp_path, "autoscale", COMPONENTS)
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)

    def by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name(rendered(name))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("namePrefix: x-", "namePrefix is not rendered here"),
        ("kind: Kustomisation", "kind 'Kustomisation'"),
        ("resources: [../elsewhere.yaml]", "is outside"),
        ("resources: [nothing.yaml]", "is missing"),
        ("resources: [one.yaml, one.yaml]", "twice"),
        ("patches: [{target: {kind: A, name: c}, patch: '[]'}]", "there is no A c"),
        ("patches: [{target: {kind: A, name: b}, patch: 'spec: {}'}]", "only JSON patches"),
        (
            "patches: [{target: {kind: A, name: b}, patch: '[{op: replace, path: /c, value: 1}]'}]",
            "nothing at /c",
        ),
        (
            "patches: [{target: {kind: A, name: b}, patch: '[{op: test, path: /kind, value: B}]'}]",
            "is 'A', not 'B'",
        ),
        ("configMapGenerator: [{name: c, literals: [d=e]}]", "hashed names"),
        (
            "configMapGenerator: [{name: c, literals: [d], options: {disableNameSuffixHash: true}}]",
            "no NAME=VALUE",
        ),
    ],
)
def test_the_renderer_refuses_what_it_does_not_render(tmp_path: Path, line: str, sentence: str) -> None:
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["one.yaml"],
    }
    content |= yaml.safe_load(line)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "one.yaml").write_text("{apiVersion: v1, kind: A, metadata: {name: b}}\n")
    (tmp_path.parent / "elsewhere.yaml").write_text("{}\n")
    with pytest.raises(KustomizeError, match=sentence):
        render(tmp_path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(KustomizeError, match="a stands twice"):
        load(tmp_path / "twice.yaml")
