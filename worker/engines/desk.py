"""Where an engine with one plain thread takes requests in: refuses, queues, drains, and says whether it still lives."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from worker.api import FinishReason, GenerateRequest
from worker.config import WorkerConfig
from worker.engines.counters import EngineCounters, QueueState
from worker.engines.streams import EventReader, EventStreams
from worker.errors import EngineDead, InvalidRequest, Overloaded

DRAIN_POLL_S = 0.01


class TakenIn(Protocol):
    """One request in the engine."""

    request: GenerateRequest

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        ...


R = TypeVar("R", bound=TakenIn)


class RequestDesk(Generic[R]):
    """The requests of one engine; what it holds is read and changed under ``changed``.

    Attributes:
        requests: all live ones by id; waiting: those that were not started yet, in order.
        closed: the engine's thread shall end.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._max_waiting = config.max_waiting
        self._stall_timeout_s = config.stall_timeout_s
        self.changed = threading.Condition()
        self.streams = EventStreams()
        self.counters = EngineCounters()
        self.requests: dict[str, R] = {}
        self.waiting: deque[R] = deque()
        self.closed = False
        self._draining = False
        self._error = ""
        self._advanced_s = time.monotonic()

    def submit(self, request: GenerateRequest, take_in: Callable[[GenerateRequest], R]) -> None:
        """Queues what ``take_in`` makes of a request; see :meth:`worker.api.Engine.submit`."""
        with self.changed:
            if self._error or self.closed:
                raise EngineDead(self._error or "The engine is closed.")
            if self._draining:
                raise Overloaded("The worker is draining.")
            if len(self.waiting) >= self._max_waiting:
                raise Overloaded(f"{len(self.waiting)} requests are waiting already (max_waiting).")
            if request.request_id in self.requests or request.request_id in self.streams:
                raise InvalidRequest("request_id", f"Request id {request.request_id!r} is in use.")
            self.streams.open(request.request_id)
            if not self.requests:
                self.advanced()
            taken = self.requests[request.request_id] = take_in(request)
            self.waiting.append(taken)
            self.counters.num_submitted += 1
            self.counters.prompt_tokens += len(request.prompt_token_ids)
            self.changed.notify()

    def stream(self, request_id: str, abort: Callable[[str], None]) -> EventReader:
        """The request's events; see :meth:`worker.api.Engine.stream`."""
        return self.streams.stream(request_id, abort)

    def queue(self, num_running: int, max_running: int) -> QueueState:
        """The queue as a snapshot tells it."""
        return QueueState(
            num_running=num_running,
            num_waiting=len(self.waiting),
            waiting_tokens=sum(taken.num_tokens for taken in self.waiting),
            max_running=max_running,
            draining=self._draining or bool(self._error),
        )

    def advanced(self) -> None:
        """The engine's thread has brought something, or had nothing to do."""
        self._advanced_s = time.monotonic()

    async def drain(self, timeout_s: float, abort: Callable[[str], None]) -> int:
        """Refuses new requests, waits, and aborts what is left after ``timeout_s``; answers how many."""
        with self.changed:
            self._draining = True
        deadline = time.monotonic() + timeout_s
        while self.requests and time.monotonic() < deadline:  # noqa: ASYNC110 (another thread ends requests)
            await asyncio.sleep(DRAIN_POLL_S)
        left = list(self.requests)
        for request_id in left:
            abort(request_id)
        return len(left)

    def check_health(self) -> None:
        """Raises EngineDead after a death, or when requests stand still for longer than ``stall_timeout_s``."""
        with self.changed:
            if self._error:
                raise EngineDead(self._error)
            idle_s = time.monotonic() - self._advanced_s
            if self.requests and idle_s > self._stall_timeout_s:
                raise EngineDead(f"The engine has not advanced for {idle_s:.1f} s.")

    def die(self, error: str) -> None:
        """Forgets all requests and ends their streams with ``error``."""
        with self.changed:
            self._error = error
            self.requests.clear()
            self.waiting.clear()
        self.streams.finish_all(FinishReason.ERROR, error)
