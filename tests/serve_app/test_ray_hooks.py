"""What Ray says about a call, in the service's own words; no cluster is needed to say it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from serve_app.deployments import ray_hooks
from serve_app.deployments.protocol import ReplicaGone
from serve_app.deployments.ray_hooks import PinnedCalls, PinnedStream
from serve_app.deployments.trunk_reader import Trunks
from serve_app.http.errors import WorkerLost
from worker.api import GenerateRequest


class Response:
    """A call whose next item is an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_cancelled = 0

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> Any:
        raise self.error

    def cancel(self) -> None:
        self.num_cancelled += 1


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        NodeDiedError("a node died"),
        ObjectLostError("0" * 56, None, "here"),
        TaskCancelledError(),
        DeploymentUnavailableError(DeploymentID("Worker")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_however_ray_says_it_a_replica_that_is_gone_is_a_lost_worker(error: Exception) -> None:
    async def read() -> None:
        stream = PinnedStream(response := Response(error))
        with pytest.raises(WorkerLost):
            await anext(stream)
        await stream.aclose()
        assert response.num_cancelled == 0, "it is over"

    asyncio.run(read())


def test_what_was_never_sent_says_so() -> None:
    async def read() -> None:
        with pytest.raises(ReplicaGone):
            await anext(PinnedStream(Response(ReplicaGone("a"))))

    asyncio.run(read())


def test_a_call_that_cannot_be_made_keeps_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        def options(self, **given: Any) -> Handle:
            return self

        @property
        def generate(self) -> Handle:
            return self

        trunk = generate

        def remote(self, *given: Any) -> Any:
            raise DeploymentUnavailableError(DeploymentID("Worker"))

    async def call() -> None:
        monkeypatch.setattr(ray_hooks, "own_replica_id", lambda: "router")
        monkeypatch.setattr(ray_hooks, "in_fresh_context", lambda call: call())
        seats = []
        seat = Trunks.seat
        monkeypatch.setattr(Trunks, "seat", lambda *given: seats.append(seat(*given)) or seats[-1])
        calls = PinnedCalls(Handle())  # type: ignore[arg-type]
        with pytest.raises(WorkerLost):
            calls.start("a", GenerateRequest("r", (1, 2)))
        assert len(seats) == 1
        assert not seats[0]._trunk._seats
        calls.close()

    asyncio.run(call())
