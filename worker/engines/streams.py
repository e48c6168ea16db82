"""Event streams: from an engine's own thread to readers on an event loop, bounded however slow the reader is.

At most a few events per request are kept: what a reader has not taken yet is merged, so a slow reader costs the tokens
of its own answer and no more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable

from worker.api import FinishReason, TokenEvent, merged_events

MERGED_EVENTS = 32
"""So many events that wait for a reader become one. Merging each as it comes would cost more than all else here."""


class _Mailbox:
    __slots__ = ("events", "finished", "loop", "num_generated", "sleeping", "wake")

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.finished = False
        self.sleeping = False
        self.num_generated = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wake: asyncio.Event | None = None


class EventStreams:
    """One mailbox per live request. ``put`` may be called from any thread; ``stream`` is called on an event loop."""

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
        """Hands one event to its request's reader; dropped when nobody can read it any more."""
        self.put_all((event,))

    def put_all(self, events: Iterable[TokenEvent]) -> None:
        """Hands a step's events over with one wake-up per event loop, whatever the number of streams."""
        sleeping: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        with self._lock:
            for event in events:
                box = self._boxes.get(event.request_id)
                if box is None or box.finished:
                    continue
                box.finished = event.finish_reason is not None
                box.num_generated = event.num_generated
                box.events.append(event)
                if len(box.events) == MERGED_EVENTS:
                    box.events = [merged_events(box.events)]
                if box.sleeping and box.loop is not None and box.wake is not None:
                    box.sleeping = False
                    sleeping.setdefault(box.loop, []).append(box.wake)
        for loop, wakes in sleeping.items():
            try:
                loop.call_soon_threadsafe(_set_all, wakes)
            except RuntimeError:  # the readers' loop was closed: nobody is left to wake
                continue

    def discard(self, request_id: str) -> None:
        """Forgets a request that never got a reader."""
        with self._lock:
            self._boxes.pop(request_id, None)

    def finish_all(self, reason: FinishReason, error: str = "") -> None:
        """Ends every open stream, e.g. when the engine died."""
        with self._lock:
            live = [
                (request_id, box.num_generated) for request_id, box in self._boxes.items() if not box.finished
            ]
        self.put_all(
            TokenEvent(request_id, num_generated=count, finish_reason=reason, error=error)
            for request_id, count in live
        )

    def stream(self, request_id: str, abort: Callable[[str], None]) -> EventReader:
        """The request's events up to the one that ends it; calls ``abort`` if the reader leaves before.

        Raises KeyError for an unknown id and RuntimeError for a second reader, at once and not at the first event.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            box = self._boxes[request_id]
            if box.loop is not None:
                raise RuntimeError(f"request {request_id!r} has a reader already")
            box.loop, box.wake = loop, asyncio.Event()
        return EventReader(self, request_id, loop, box.wake, abort)

    def take(self, request_id: str, *, wakes: bool) -> TokenEvent | None:
        """What waits for the request's reader, as one event, or None. ``wakes``: then the next event wakes it."""
        with self._lock:
            box = self._boxes[request_id]
            events, box.events = box.events, []
            if not events and wakes and box.wake is not None:
                box.wake.clear()
                box.sleeping = True
        return merged_events(events) if events else None


class EventReader(AsyncIterator[TokenEvent]):
    """The reading end of one stream.

    A class and not an async generator: leaving before the first event must abort the request too, and closing a
    generator that was never started runs none of its code.
    """

    def __init__(
        self,
        streams: EventStreams,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        wake: asyncio.Event,
        abort: Callable[[str], None],
    ) -> None:
        self._streams = streams
        self._request_id = request_id
        self._loop = loop
        self._wake = wake
        self._abort = abort
        self._open = True

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._open:
            raise StopAsyncIteration
        try:
            while (event := self._streams.take(self._request_id, wakes=True)) is None:
                await self._wake.wait()
        except BaseException:  # a cancelled reader has left
            self._close(ended=False)
            raise
        if event.finish_reason is not None:
            self._close(ended=True)
        return event

    def poll(self) -> TokenEvent | None:
        """What has come since the last event, as one; None for nothing. Nobody may be waiting for the next event."""
        if not self._open:
            return None
        event = self._streams.take(self._request_id, wakes=False)
        if event is not None and event.finish_reason is not None:
            self._close(ended=True)
        return event

    async def aclose(self) -> None:
        """Leaves the stream; aborts the request unless its last event was read."""
        self._close(ended=False)

    def __del__(self) -> None:
        if not self._open:
            return
        self._open = False
        try:  # not from here: the collector may run inside a thread that holds the locks that leaving takes
            self._loop.call_soon_threadsafe(_leave, self._streams, self._request_id, self._abort)
        except RuntimeError:  # the loop is closed
            _leave(self._streams, self._request_id, self._abort)

    def _close(self, ended: bool) -> None:
        if not self._open:
            return
        self._open = False
        if ended:
            self._streams.discard(self._request_id)
        else:
            _leave(self._streams, self._request_id, self._abort)


def _leave(streams: EventStreams, request_id: str, abort: Callable[[str], None]) -> None:
    streams.discard(request_id)
    abort(request_id)


def _set_all(wakes: list[asyncio.Event]) -> None:
    for wake in wakes:
        wake.set()
