"""What a Router does about workers that die: how far a request is carried on, and what of them is remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_app.deployments import dispatch
from tests.helpers.eventually import soon
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served
from worker.config import WorkerConfig
from worker.engines.fake import FakeEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """Answers at once."""
    return write_model_folder(tmp_path / "quick", script=scripted("Yes."))


def test_a_request_that_kills_every_worker_it_meets_is_given_up(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        for replica in cluster.replicas.values():
            replica.lost = True
        answer = await cluster.client.post(CHAT, json=BODY)
        assert answer.status_code == 503
        asked = [replica.num_calls for replica in cluster.replicas.values()]
        assert sum(asked) == dispatch.MOST_LOST == 3
        for replica in cluster.replicas.values():
            replica.lost = False

    served(quick, use, num_replicas=6)


def test_workers_that_only_refuse_are_all_asked(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        for replica in cluster.replicas.values():
            replica.vetoes = 1
        assert (await cluster.client.post(CHAT, json=BODY)).status_code == 429
        assert [replica.num_calls for replica in cluster.replicas.values()] == [1] * 6

    served(quick, use, num_replicas=6)


def test_a_call_that_cannot_even_be_made_leaves_no_booking(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cluster: Cluster) -> None:
        def fails(*given: Any) -> Any:
            raise RuntimeError("no such deployment")

        monkeypatch.setattr(cluster.transport, "start", fails)
        answer = await cluster.client.post(CHAT, json=BODY)
        assert answer.status_code == 500
        assert cluster.dispatcher.num_open == 0

    served(quick, use)


def test_workers_that_are_gone_for_good_are_forgotten(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BAN_S", 0.05)

    async def use(cluster: Cluster) -> None:
        gone = cluster.replicas["replica0"]
        gone.gone = True
        cluster.reporting.discard("replica0")
        for _ in range(4):
            assert (await cluster.client.post(CHAT, json=BODY)).status_code == 200
        assert "replica0" not in cluster.dispatcher._placement.views
        # Its last words come behind its end, in the answer to a call: nobody would take it out again.
        cluster.dispatcher._placement.report("replica0", gone.engine.snapshot(), -100.0)
        await soon(
            lambda: (set(cluster.dispatcher._placement.views), cluster.dispatcher._banned_until_s),
            lambda seen: seen == ({"replica1"}, {}),
            within_s=5.0,
        )

    served(quick, use, num_replicas=2)


def test_where_the_only_engine_died_requests_wait_for_the_next(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        replica = cluster.replicas["replica0"]
        replica.engine._die("the test killed it")
        views = cluster.dispatcher._placement.views
        await soon(lambda: [view.snapshot.draining for view in views.values() if view.snapshot] == [True])
        waiting = asyncio.create_task(cluster.client.post(CHAT, json=BODY))
        await soon(lambda: cluster.dispatcher.num_waiting == 1)
        dead, replica.engine = replica.engine, FakeEngine(WorkerConfig(model=str(quick), engine="fake"))
        replica.server.engine = replica.engine
        cluster.dispatcher._placement.remove("replica0")  # as with the next replica's own name
        assert (await waiting).status_code == 200
        dead.close()

    served(quick, use)


def test_a_worker_whose_engine_died_gets_no_more_requests(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "mortal", script=scripted("Yes."))

    async def use(cluster: Cluster) -> None:
        dead = cluster.replicas["replica0"]
        dead.engine._die("the test killed it")
        # It reports on, as a Worker does until Serve has replaced it.
        await soon(lambda: any(report.snapshot.draining for report in cluster.dispatcher.live_reports()))
        before = dead.num_calls
        answers = await asyncio.gather(*(cluster.client.post(CHAT, json=BODY) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert dead.num_calls == before

    served(folder, use, num_replicas=2)
