"""API keys: who may call, how often and how much, and that keys share nothing and show nowhere."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.http.access import AccessRules
from serve_app.http.api_keys import KeyRing, hash_key, main, new_key
from serve_app.http.routes import create_app
from serve_app.policies.expert_affinity import affinity_keys, joined_levels
from tests.helpers.eventually import soon
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.in_process import Cluster, running_cluster
from worker.api import GenerateRequest
from worker.errors import ConfigError

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
ALICE, BOB = "hr-alice-secret", "hr-bob-secret"


def key_file(folder: Path, **limits: Any) -> Path:
    """Keys of Alice, with limits, and Bob, without."""
    file = folder / "keys.json"
    entries = [
        {"name": "alice", "sha256": hash_key(ALICE), **limits},
        {"name": "bob", "sha256": hash_key(BOB)},
    ]
    file.write_text(json.dumps({"keys": entries}))
    return file


def served(
    folder: Path,
    keys: Path,
    use: Callable[[Cluster], Awaitable[Any]],
    tokens_per_s: float = 0.0,
    **rules: Any,
) -> Any:
    """Runs ``use`` on a service that asks for keys."""
    model = write_model_folder(folder / "m", script=scripted("hello", tokens_per_s=tokens_per_s))

    async def run() -> Any:
        access = AccessRules(KeyRing(keys), **rules)
        async with running_cluster(model, wrap=lambda backend: create_app(backend, access)) as cluster:
            return await use(cluster)

    return asyncio.run(run())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(cluster: Cluster, key: str = ALICE, **more: Any) -> httpx.Response:
    return await cluster.client.post(CHAT, json={**BODY, **more}, headers=bearer(key))


def test_a_key_is_needed_except_for_probes(tmp_path: Path) -> None:
    async def use(cluster: Cluster) -> None:
        for headers in ({}, bearer("wrong"), {"Authorization": ALICE}, bearer(hash_key(ALICE))):
            refused = await cluster.client.post(CHAT, json=BODY, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await cluster.client.get("/v1/models")).status_code == 401
        assert (await cluster.client.get("/v1/models", headers=bearer(BOB))).status_code == 200
        assert (await ask(cluster)).status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert (await cluster.client.get(path)).status_code == 200

    served(tmp_path, key_file(tmp_path), use)


@pytest.mark.parametrize("root", ["", "/", "/app"])
def test_probes_need_no_key_under_any_route_prefix(tmp_path: Path, root: str) -> None:
    async def run() -> list[int]:
        async with running_cluster(write_model_folder(tmp_path / "m")) as cluster:
            app = create_app(cluster.backend, AccessRules(KeyRing(key_file(tmp_path))))
            transport = httpx.ASGITransport(app=app, root_path=root)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                paths = [root.rstrip("/") + path for path in ("/health", "/v1/models")]
                return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(run()) == [200, 401]


def test_a_rate_is_held_and_belongs_to_one_key(tmp_path: Path) -> None:
    async def use(cluster: Cluster) -> None:
        codes = [(await ask(cluster)).status_code for _ in range(5)]
        assert codes == [200, 200, 200, 429, 429]
        refused = await ask(cluster)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 21
        assert (await ask(cluster, BOB)).status_code == 200

    served(tmp_path, key_file(tmp_path, requests_per_minute=3), use)


def test_running_requests_are_bounded_until_they_end(tmp_path: Path) -> None:
    async def use(cluster: Cluster) -> None:
        answers = await asyncio.gather(*(ask(cluster, stream=True) for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        assert (await ask(cluster)).status_code == 200
        left = asyncio.create_task(ask(cluster))
        await soon(lambda: cluster.dispatcher.num_open)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert [a.status_code for a in await asyncio.gather(ask(cluster), ask(cluster))] == [200, 200]

    served(tmp_path, key_file(tmp_path, max_concurrent=2), use, tokens_per_s=20.0)


def test_a_body_is_bounded_with_and_without_its_length_declared(tmp_path: Path) -> None:
    async def chunked() -> AsyncIterator[bytes]:
        yield b'{"messages": ['
        for _ in range(100):
            yield b" " * 100

    async def use(cluster: Cluster) -> None:
        big = {"messages": [{"role": "user", "content": "x" * 3000}]}
        refused = await cluster.client.post(CHAT, json=big, headers=bearer(ALICE))
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "request_too_large"
        streamed = await cluster.client.post(CHAT, content=chunked(), headers=bearer(ALICE))
        assert streamed.status_code == 413
        assert (await cluster.client.post(CHAT, json=big, headers=bearer(BOB))).status_code == 200
        assert (await ask(cluster)).status_code == 200

    served(tmp_path, key_file(tmp_path, max_body_bytes=2000), use)


def test_keys_share_no_prefixes_and_sessions_belong_together(tmp_path: Path) -> None:
    seen: list[GenerateRequest] = []

    async def use(cluster: Cluster) -> None:
        engine = cluster.replicas["replica0"].engine
        submit = engine.submit
        engine.submit = lambda request: (seen.append(request), submit(request))[1]
        await ask(cluster)
        await ask(cluster, BOB)
        await ask(cluster, BOB, cache_salt=hash_key(ALICE)[:16] + "/")
        await cluster.client.post(CHAT, json=BODY, headers={**bearer(BOB), "x-session-id": "s1"})
        await ask(cluster, BOB, user="u1")

    served(tmp_path, key_file(tmp_path), use)
    assert len({request.cache_salt for request in seen[:3]}) == 3
    assert all(request.cache_salt for request in seen)
    keys = [affinity_keys(request.affinity_key) for request in seen]
    session, user = joined_levels(["bob", "s1"]), joined_levels(["bob", "u1"])
    assert keys == [("alice",), ("bob",), ("bob",), (session, "bob"), (user, "bob")]


def test_the_file_is_read_again_when_it_changes_and_kept_when_it_is_spoiled(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    ring = KeyRing(file)
    assert ring.find(ALICE, 0.0) is not None
    file.write_text(json.dumps({"keys": [{"name": "carol", "sha256": hash_key("c")}]}))
    os.utime(file, ns=(1, 1))
    assert ring.find(ALICE, 1.0) is not None, "not looked at again yet"
    assert ring.find(ALICE, 10.0) is None
    assert ring.find("c", 11.0) is not None
    file.write_text("{")
    assert ring.find("c", 20.0) is not None


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"keys": [{"name": "a", "sha256": "x"}]}', '{"keys": [], "more": 1}']
)
def test_a_wrong_file_stops_the_start(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="api_keys_file"):
        KeyRing(file)
    with pytest.raises(ConfigError, match="api_keys_file"):
        KeyRing(tmp_path / "missing.json")


def test_a_key_in_the_place_of_its_hash_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "sha256": "hr-the-key-itself"}]}))
    with pytest.raises(ConfigError, match="sha256") as refused:
        KeyRing(file)
    assert "hr-the-key-itself" not in str(refused.value)


def test_a_new_key_is_shown_once_and_fits_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    key, entry = new_key("dave")
    assert entry == {"name": "dave", "sha256": hash_key(key)}
    assert new_key("dave")[0] != key
    assert main(["erin"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("hr-") == 1
    assert main([]) == main(["--help"]) == main(["erin", "--admin"]) == 2


def test_neither_keys_nor_prompts_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret_prompt = "the treasure is under the tree"

    async def use(cluster: Cluster) -> None:
        for key in (ALICE, "hr-wrong-secret"):
            for body in (
                BODY,
                {"messages": [{"role": "user", "content": secret_prompt}]},
                {"messages": secret_prompt},
            ):
                await cluster.client.post(CHAT, json=body, headers=bearer(key))
        # An error that nobody foresaw is logged with its trace.
        cluster.backend.models = lambda: 1 / 0  # type: ignore[method-assign,assignment]
        assert (await ask(cluster)).status_code == 500

    for room in ("serve_app", "worker"):
        logging.getLogger(room).propagate = True
    with caplog.at_level(logging.DEBUG):
        served(tmp_path, key_file(tmp_path), use)
    assert "ZeroDivisionError" in caplog.text
    for secret in (ALICE, "hr-wrong-secret", "treasure"):
        assert secret not in caplog.text
