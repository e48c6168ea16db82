"""Ends a Router's wait for a worker's next item where that would never come: past a deadline, or from a silent worker.

A wait per message must cost next to nothing, so nothing is timed per message: housekeeping looks at all open streams a
few times a second and interrupts those that are to end.
"""

from __future__ import annotations

import asyncio
import time

from serve_app.deployments.protocol import ReplicaStream, StreamItem
from serve_app.http.errors import DeadlinePassed, WorkerLost

KEEP_S = 60.0
"""A worker that was not heard of for so long is forgotten."""


class StreamWatch:
    """One open stream of a worker: reads its items, and lets :meth:`fail` end a wait for the next one."""

    __slots__ = (
        "_failure",
        "_reader",
        "_since_s",
        "_stream",
        "ended_by_s",
        "heard_s",
        "opened_s",
        "replica_id",
    )

    def __init__(self, replica_id: str, stream: ReplicaStream, ended_by_s: float) -> None:
        self.replica_id = replica_id
        self.ended_by_s = ended_by_s
        self.opened_s = self.heard_s = time.monotonic()
        self._stream = stream
        self._reader: asyncio.Task[object] | None = None
        self._since_s = 0.0
        self._failure: Exception | None = None

    async def next(self) -> StreamItem:
        """The stream's next item; raises what the stream raises, or what :meth:`fail` was given."""
        if self._failure is not None:
            raise self._failure
        self._reader = reader = asyncio.current_task()
        self._since_s = time.monotonic()
        try:
            item = await anext(self._stream)
        except asyncio.CancelledError:
            # Interrupted here, and not cancelled by somebody else besides (as asyncio.timeout tells the two apart).
            if self._failure is not None and reader is not None and not reader.uncancel():
                raise self._failure from None
            raise
        finally:
            self._reader = None
        self.heard_s = time.monotonic()
        return item

    def waits_s(self, now_s: float) -> float:
        """For how long somebody has been waiting for an item; 0 if nobody is."""
        return now_s - self._since_s if self._reader is not None else 0.0

    async def fail(self, failure: Exception) -> None:
        """Ends the stream: whoever waits gets ``failure``; otherwise, whoever asks next, and the worker is told now."""
        if self._failure is not None:
            return
        self._failure = failure
        if self._reader is not None:
            self._reader.cancel()
        else:
            await self._stream.aclose()

    async def aclose(self) -> None:
        """Cancels the call; may be called twice."""
        await self._stream.aclose()


class Watchers:
    """The open streams of one Router. ``silence_s``: a worker that has said nothing for so long, on no stream and in no
    report, is given up."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._open: set[StreamWatch] = set()
        self._heard_s: dict[str, float] = {}

    def heard(self, replica_id: str, now_s: float) -> None:
        """A worker reported."""
        self._heard_s[replica_id] = now_s

    def pardon(self, seconds: float) -> None:
        """This process stood still for so long and could hear nobody: that is no worker's silence."""
        for replica_id in self._heard_s:
            self._heard_s[replica_id] += seconds

    def watch(self, replica_id: str, stream: ReplicaStream, ended_by_s: float) -> StreamWatch:
        """Looks after a stream from now on."""
        watch = StreamWatch(replica_id, stream, ended_by_s)
        self._open.add(watch)
        return watch

    def unwatch(self, watch: StreamWatch) -> None:
        """The stream is over."""
        self._open.discard(watch)

    async def look(self, now_s: float) -> None:
        """Ends the streams that are to end."""
        for watch in self._open:
            # What comes on any of its streams is a sign of life, too.
            self.heard(watch.replica_id, max(watch.heard_s, self._heard_s.get(watch.replica_id, 0.0)))
        for watch in list(self._open):
            if now_s >= watch.ended_by_s:
                took_s = now_s - watch.opened_s
                await watch.fail(DeadlinePassed(f"The request was ended after {took_s:.0f} s at its worker."))
            elif watch.waits_s(now_s) > self._silence_s and self._is_silent(watch, now_s):
                await watch.fail(WorkerLost(f"no sign of life for {self._silence_s:g} s"))
        for replica_id, at_s in list(self._heard_s.items()):
            if now_s - at_s > KEEP_S:
                del self._heard_s[replica_id]

    def _is_silent(self, watch: StreamWatch, now_s: float) -> bool:
        return now_s - self._heard_s[watch.replica_id] > self._silence_s
