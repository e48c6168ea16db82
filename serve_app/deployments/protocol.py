"""What crosses between Router and Worker: the items of a worker's stream, and its reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from worker.api import GenerateRequest, ModelInfo, TokenEvent, WorkerSnapshot
from worker.errors import EngineDead, InvalidRequest, Overloaded


@dataclass(frozen=True, slots=True)
class Accepted:
    """First item of a stream: the worker has the request."""

    snapshot: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Refused:
    """Last item of a stream: the worker does not take the request, why, and its state now. As the only item it is a
    veto; behind others, the request itself turned out to be impossible."""

    error: InvalidRequest | Overloaded | EngineDead
    snapshot: WorkerSnapshot | None


StreamItem = Accepted | Refused | TokenEvent


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker pushes to every Router. ``replica_id`` is Serve's name of it."""

    replica_id: str
    model: ModelInfo
    snapshot: WorkerSnapshot


class ReplicaGone(Exception):
    """The named replica is not among those that Serve routes to."""


class ReplicaStream(Protocol):
    """A started call of a worker: items in order; closing it cancels the call. Raises WorkerLost when the worker died,
    ReplicaGone when it was not there to begin with."""

    def __aiter__(self) -> ReplicaStream: ...

    async def __anext__(self) -> StreamItem: ...

    async def aclose(self) -> None:
        """Cancels the call; may be called twice."""
        ...


class Transport(Protocol):
    """Starts calls of workers by replica id."""

    def start(self, replica_id: str, request: GenerateRequest) -> ReplicaStream:
        """Sends the request; answers at once."""
        ...

    async def ask(self, replica_id: str, question: str, *given: Any) -> Any:
        """Calls a method of a worker once. Raises WorkerLost (also for what the method raised) or ReplicaGone."""
        ...

    async def report_of(self, replica_id: str) -> WorkerReport:
        """A worker's report, asked for. Raises WorkerLost or ReplicaGone."""
        ...

    async def wake(self) -> WorkerReport | None:
        """The report of whichever worker is there first. Waiting for one makes Serve start it where there is none."""
        ...
