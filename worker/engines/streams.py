"""Event streams: from an engine's own thread to readers on an event loop, bounded however slow the reader is.

At most one event per request is kept: events that a reader has not taken yet are merged, so a slow reader costs
the tokens of its own answer and no more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from worker.api import FinishReason, TokenEvent


class _Mailbox:
    __slots__ = ("event", "finished", "loop", "reading", "wake")

    def __init__(self) -> None:
        self.event: TokenEvent | None = None
        self.finished = False
        self.reading = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wake: asyncio.Event | None = None


class EventStreams:
    """One mailbox per live request. ``put`` may be called from any thread; ``stream`` runs on an event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[str, _Mailbox] = {}

    def __len__(self) -> int:
        return len(self._boxes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._boxes

    def open(self, request_id: str) -> None:
        """Makes room for a request's events; raises ValueError when the id is live already."""
        with self._lock:
            if request_id in self._boxes:
                raise ValueError(f"request id {request_id!r} is in use")
            self._boxes[request_id] = _Mailbox()

    def put(self, event: TokenEvent) -> None:
        """Hands an event to the request's reader; dropped when nobody can read it any more."""
        with self._lock:
            box = self._boxes.get(event.request_id)
            if box is None or box.finished:
                return
            box.event = event if box.event is None else box.event.merged_with(event)
            box.finished = event.finish_reason is not None
            loop, wake = box.loop, box.wake
        if loop is not None and wake is not None and not loop.is_closed():
            loop.call_soon_threadsafe(wake.set)

    def discard(self, request_id: str) -> None:
        """Forgets a request that never got a reader."""
        with self._lock:
            self._boxes.pop(request_id, None)

    def finish_all(self, reason: FinishReason, error: str = "") -> None:
        """Ends every open stream, e.g. when the engine died."""
        with self._lock:
            live = [request_id for request_id, box in self._boxes.items() if not box.finished]
        for request_id in live:
            self.put(TokenEvent(request_id, finish_reason=reason, error=error))

    async def stream(self, request_id: str, abort: Callable[[str], None]) -> AsyncIterator[TokenEvent]:
        """Yields the request's events up to the one that ends it; calls ``abort`` if the reader leaves before.

        Raises KeyError for an unknown id and RuntimeError for a second reader.
        """
        wake = asyncio.Event()
        with self._lock:
            box = self._boxes[request_id]
            if box.reading:
                raise RuntimeError(f"request {request_id!r} has a reader already")
            box.reading, box.loop, box.wake = True, asyncio.get_running_loop(), wake
        ended = False
        try:
            while not ended:
                with self._lock:
                    event, box.event = box.event, None
                    wake.clear()
                if event is None:
                    await wake.wait()
                    continue
                ended = event.finish_reason is not None
                yield event
        finally:
            with self._lock:
                self._boxes.pop(request_id, None)
            if not ended:
                abort(request_id)
