"""Operators' routes: who may use them, what they show, and what they do to a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.deployments import engine_server
from serve_app.http.access import AccessRules
from serve_app.http.api_keys import KeyRing, new_key
from serve_app.http.routes import create_app
from tests.helpers.eventually import soon
from tests.serve_app.in_process import Cluster, served
from tests.serve_app.test_dispatch import ask, quick, slow
from worker.errors import EngineDead

__all__ = ["quick", "slow"]  # fixtures

LOCAL = ("127.0.0.1", 40_000)
FAR = ("192.0.2.7", 40_000)


async def fetch(cluster: Cluster, rules: AccessRules, caller: tuple[str, int], **headers: str) -> int:
    """The status of ``GET /admin/replicas`` for a caller."""
    app = create_app(cluster.backend, rules, cluster.backend)
    transport = httpx.ASGITransport(app=app, client=caller)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        statuses = {
            (await client.get(path, headers=headers)).status_code
            for path in ("/admin/replicas", "/arena", "/experts")
        }
    assert len(statuses) == 1, "they are guarded alike"
    return statuses.pop()


def test_operators_are_on_this_machine_or_have_an_admin_key(quick: Path, tmp_path: Path) -> None:
    admin, admin_entry = new_key("operator")
    plain, plain_entry = new_key("user")
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{**admin_entry, "admin": True}, plain_entry]}))

    async def use(cluster: Cluster) -> None:
        keys, none = AccessRules(KeyRing(file)), AccessRules()
        hidden = AccessRules(trusts_loopback=False)
        assert await fetch(cluster, none, LOCAL) == 200
        assert await fetch(cluster, none, ("::1", 1)) == 200
        assert await fetch(cluster, none, FAR) == 403
        assert await fetch(cluster, hidden, LOCAL) == 403
        assert await fetch(cluster, none, LOCAL, **{"x-forwarded-for": "192.0.2.7"}) == 403
        assert await fetch(cluster, none, LOCAL, origin="http://example.org") == 403
        for good in ("127.0.0.1:8000", "[::1]:8000", "LOCALHOST"):
            assert await fetch(cluster, none, LOCAL, host=good) == 200
        for page in ("example.org:8000", "", "[::1", "localhost.example.org"):
            assert await fetch(cluster, none, LOCAL, host=page) == 403
        assert await fetch(cluster, keys, LOCAL) == 200
        assert await fetch(cluster, keys, FAR) == 401
        assert await fetch(cluster, keys, FAR, authorization=f"Bearer {plain}") == 403
        assert await fetch(cluster, keys, FAR, authorization=f"Bearer {admin}") == 200

    served(quick, use)


def test_replicas_are_listed_with_their_last_snapshots(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        await ask(cluster)

        async def listed() -> list[Any]:
            return list((await cluster.client.get("/admin/replicas")).json()["data"])

        data = await soon(listed, lambda data: sum(e["snapshot"]["num_finished"] for e in data) > 0)
        assert [entry["replica"] for entry in data] == ["replica0", "replica1"]
        assert sum(entry["snapshot"]["num_finished"] for entry in data) == 1
        assert all(entry["age_s"] < 20.0 for entry in data)
        assert {"arena_bytes", "available_bytes", "kinds"} <= set(data[0]["snapshot"]["headroom"])

    served(quick, use, num_replicas=2)


def test_reports_come_from_every_engine_that_has_them(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        setattr(cluster.replicas["replica1"].engine, engine_server.REPORTS["experts"], lambda: {"places": 7})
        both = (await cluster.client.get("/experts")).json()["data"]
        assert {entry["replica"]: entry["experts"] for entry in both} == {
            "replica0": None,
            "replica1": {"places": 7},
        }
        [one] = (await cluster.client.get("/experts", params={"replica": "replica1"})).json()["data"]
        assert one == {"model": "fake-model", "replica": "replica1", "experts": {"places": 7}}
        assert (await cluster.client.get("/arena")).json()["data"][0]["arena"] is None
        assert (await cluster.client.get("/arena", params={"replica": "nobody"})).status_code == 404
        cluster.replicas["replica0"].lost = True
        answers = {e["replica"]: e for e in (await cluster.client.get("/experts")).json()["data"]}
        assert "WorkerLost" in answers["replica0"]["error"]
        assert answers["replica1"]["experts"] == {"places": 7}

    served(quick, use, num_replicas=2)


def test_a_flush_reaches_all_or_the_one_that_is_named(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        flushed: list[str] = []
        for name, replica in cluster.replicas.items():
            replica.engine.flush_prefix_cache = lambda name=name: flushed.append(name) or 4096
        found = (await cluster.client.post("/admin/flush", json={})).json()["data"]
        assert [entry["freed_bytes"] for entry in found] == [4096, 4096]
        await cluster.client.post("/admin/flush", json={"replica": "replica1"})
        assert sorted(flushed) == ["replica0", "replica1", "replica1"]
        wrong = await cluster.client.post("/admin/flush", json={"replicas": "replica1"})
        assert wrong.status_code == 400

    served(quick, use, num_replicas=2)


async def drain(cluster: Cluster, name: str, **more: Any) -> Mapping[str, Any]:
    """Drains a worker; its entry of the answer."""
    response = await cluster.client.post("/admin/drain", json={"replica": name, **more})
    [entry] = response.json()["data"]
    found: Mapping[str, Any] = entry
    return found


def test_a_drained_worker_ends_its_streams_takes_no_others_and_asks_to_be_replaced(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        streams = [asyncio.create_task(ask(cluster, stream=True)) for _ in range(4)]
        await cluster.flowing(4)
        leaving, staying = cluster.replicas["replica0"], cluster.replicas["replica1"]
        draining = asyncio.create_task(drain(cluster, "replica0"))
        await soon(lambda: leaving.engine.snapshot().draining)
        if leaving.server.num_streams:
            leaving.server.check_health()  # not before its streams are over
        calls = leaving.num_calls
        later = await asyncio.gather(*(ask(cluster, max_tokens=2) for _ in range(4)))
        assert [answer.status_code for answer in later] == [200] * 4
        assert leaving.num_calls <= calls + 1
        assert (await draining)["aborted"] == 0
        answers = await asyncio.gather(*streams)
        assert all('"finish_reason":"stop"' in answer.text for answer in answers)
        await soon(lambda: not leaving.server.num_streams)
        with pytest.raises(EngineDead, match="drained"):
            leaving.server.check_health()
        staying.server.check_health()

    served(slow, use, num_replicas=2)


def test_what_still_runs_at_a_drains_end_is_aborted_and_counted(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        stream = asyncio.create_task(ask(cluster, stream=True, ignore_eos=True, max_tokens=3000))
        await cluster.flowing(1)
        assert (await drain(cluster, "replica0", timeout_s=0.2))["aborted"] == 1
        await stream

    served(slow, use)
