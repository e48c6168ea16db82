"""Operations on real Ray Serve: the manual's configuration file and that of a Kubernetes overlay, deployed, and the
operators' routes behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helpers.eventually import eventually
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.k8s.deployed import K8S, Deployed
from tests.k8s.kustomize import render
from tests.serve_app.conftest import DEPLOY_S

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).resolve().parents[3]
CHAT = "/v1/chat/completions"


class Declared:
    """Applications of a configuration file, deployed as ``serve deploy`` does it."""

    def __init__(self) -> None:
        from ray.serve.context import _get_global_client

        self._client: Any = _get_global_client()

    def deploy(self, content: dict[str, Any]) -> None:
        """Hands the file's content to Serve; answers before anything runs."""
        from ray.serve.schema import ServeDeploySchema

        self._client.deploy_apps(ServeDeploySchema.model_validate(content))

    def message(self, name: str, wanted: str) -> str:
        """What Serve says of an application once its status is the one wanted."""
        from ray import serve

        state = eventually(
            lambda: serve.status().applications.get(name),
            lambda state: state is not None and state.status.value == wanted,
            within_s=DEPLOY_S,
            pause_s=0.1,
        )
        assert state is not None
        return state.message

    def delete(self, *names: str) -> None:
        """Takes applications away."""
        self._client.delete_apps(list(names), blocking=True)


@pytest.fixture
def declared(serve_url: str) -> Iterator[Declared]:
    """A client; what a test deployed under these names is deleted."""
    client = Declared()
    yield client
    client.delete("headroom", "wrong", "kubernetes")


def test_the_manuals_file_deploys_a_wrong_one_says_why_and_operators_get_in(
    declared: Declared, serve_url: str, tmp_path: Path
) -> None:
    content = yaml.safe_load((ROOT / "docs" / "serve.yaml").read_text())
    [good] = content["applications"]
    folder = write_model_folder(tmp_path / "m", script=scripted("Deployed."))
    # As in the manual, but for the model and the address, which the shared cluster has already.
    good |= {"route_prefix": "/headroom"}
    good["args"] |= {"model": str(folder), "engine": "fake", "graceful_shutdown_timeout_s": 2.0}
    wrong = {**good, "name": "wrong", "route_prefix": "/wrong", "args": {**good["args"], "max_runing": 3}}
    [overlay] = Deployed(render(K8S / "overlays" / "demo-cpu")).config["applications"]
    kubernetes = {**overlay, "name": "kubernetes", "route_prefix": "/kubernetes"}
    kubernetes["args"] |= {"model": str(folder), "engine": "fake", "graceful_shutdown_timeout_s": 2.0}
    declared.deploy({"applications": [good, wrong, kubernetes]})
    message = declared.message("wrong", "DEPLOY_FAILED")
    assert "there is no option 'max_runing'; did you mean 'max_running'" in message
    declared.message("kubernetes", "RUNNING")
    declared.message("headroom", "RUNNING")
    body = {"messages": [{"role": "user", "content": "hello"}]}
    for prefix in ("kubernetes", "headroom"):
        answer = httpx.post(f"{serve_url}/{prefix}{CHAT}", json=body, timeout=60).json()
        assert answer["model"] == "demo"
        assert answer["choices"][0]["message"]["content"] == "Deployed."

    # The operators' routes over Serve's own proxy, which says whom it speaks for: a caller on this machine. What
    # they show is the snapshot pushed last, which may have left the worker before the answer's end was counted.
    [worker] = eventually(
        lambda: httpx.get(f"{serve_url}/headroom/admin/replicas", timeout=20).json()["data"],
        lambda data: data[0]["snapshot"]["num_finished"] > 0,
    )
    assert (worker["model"], worker["snapshot"]["num_finished"]) == ("demo", 1)
    for report in ("arena", "experts"):
        [entry] = httpx.get(f"{serve_url}/headroom/{report}", timeout=20).json()["data"]
        assert entry == {"model": "demo", "replica": worker["replica"], report: None}
    chosen = {"replica": worker["replica"]}
    flushed = httpx.post(f"{serve_url}/headroom/admin/flush", json=chosen, timeout=20)
    assert flushed.json()["data"][0]["freed_bytes"] is None
    assert httpx.post(f"{serve_url}/headroom/admin/drain", json={"replica": "nobody"}).status_code == 404
    elsewhere = {"x-forwarded-for": "192.0.2.7"}
    assert httpx.get(f"{serve_url}/headroom/admin/replicas", headers=elsewhere).status_code == 403
