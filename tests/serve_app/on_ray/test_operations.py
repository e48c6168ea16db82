"""Operations on real Ray Serve: the manual's configuration file, deployed, and the operators' routes behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helpers.tokenizers import scripted, write_model_folder

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

    def status(self, name: str, *wanted: str, timeout_s: float = 40.0) -> tuple[str, str]:
        """Status and message of an application, once the status is one of those wanted."""
        from ray import serve

        end = time.monotonic() + timeout_s
        while True:
            state = serve.status().applications.get(name)
            if state is not None and state.status.value in wanted:
                return state.status.value, state.message
            assert time.monotonic() < end, f"{name} is {state}"
            time.sleep(0.1)

    def delete(self, *names: str) -> None:
        """Takes applications away."""
        self._client.delete_apps(list(names), blocking=True)


@pytest.fixture
def declared(serve_url: str) -> Iterator[Declared]:
    """A client; what a test deployed under these names is deleted."""
    client = Declared()
    yield client
    client.delete("headroom", "wrong")


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
    declared.deploy({"applications": [good, wrong]})
    _, message = declared.status("wrong", "DEPLOY_FAILED")
    assert "there is no option 'max_runing'; did you mean 'max_running'" in message
    declared.status("headroom", "RUNNING")
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = httpx.post(f"{serve_url}/headroom{CHAT}", json=body, timeout=20).json()
    assert answer["model"] == "demo"
    assert answer["choices"][0]["message"]["content"] == "Deployed."

    # The operators' routes over Serve's own proxy, which says whom it speaks for: a caller on this machine. What
    # they show is the snapshot pushed last, which may have left the worker before the answer's end was counted.
    end = time.monotonic() + 20.0
    while True:
        [worker] = httpx.get(f"{serve_url}/headroom/admin/replicas").json()["data"]
        if worker["snapshot"]["num_finished"] or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert (worker["model"], worker["snapshot"]["num_finished"]) == ("demo", 1)
    for report in ("arena", "experts"):
        [entry] = httpx.get(f"{serve_url}/headroom/{report}").json()["data"]
        assert entry == {"model": "demo", "replica": worker["replica"], report: None}
    flushed = httpx.post(f"{serve_url}/headroom/admin/flush", json={"replica": worker["replica"]})
    assert flushed.json()["data"][0]["freed_bytes"] is None
    assert httpx.post(f"{serve_url}/headroom/admin/drain", json={"replica": "nobody"}).status_code == 404
    elsewhere = {"x-forwarded-for": "192.0.2.7"}
    assert httpx.get(f"{serve_url}/headroom/admin/replicas", headers=elsewhere).status_code == 403
