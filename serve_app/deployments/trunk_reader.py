"""The Router's end of its trunks: opens one per worker, hands what comes to the requests' streams, closes idle ones.

A request never waits for its trunk: until the worker knows it, its own call brings the events. No Ray here.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Callable
from typing import Protocol

from serve_app.deployments.protocol import Refused, StreamItem
from serve_app.deployments.trunk import Moved, SeatPlace, decode, new_trunk_id
from serve_app.http.errors import WorkerLost
from worker.api import TokenEvent, merged_events

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""A trunk without seats is closed after so long. Not later: while it is open, Serve waits for it when it takes the
worker away. Not at once: the next request would have to open one anew."""
LONGEST_LIFE_S = 600.0
"""New requests take seats on a new trunk after so long: a worker that is never idle would have one call for ever, and
what Ray keeps per item of a call would grow for ever."""
END_S = 1.0
"""A call whose stream has ended on the trunk ends within milliseconds; after so long it is cancelled."""
MERGED_ITEMS = 32
"""So many events that wait for a slow reader become one."""


class RequestCall(Protocol):
    """A request's own call: items in order, the last one of which may say that the rest comes by the trunk."""

    def __aiter__(self) -> RequestCall: ...

    async def __anext__(self) -> StreamItem | Moved: ...

    async def aclose(self) -> None:
        """Cancels the call unless it is over; may be called twice."""
        ...


class TrunkCall(Protocol):
    """A trunk's call: its messages, until it is closed. Raises WorkerLost and the like when the worker is gone."""

    def __aiter__(self) -> TrunkCall: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None:
        """Cancels the call; may be called twice."""
        ...


class Seat:
    """Where one request's events arrive. One reader."""

    __slots__ = ("_failure", "_items", "_trunk", "_waiting", "place", "request_id")

    def __init__(self, trunk: _Trunk, number: int, request_id: str) -> None:
        self._trunk = trunk
        self._items: list[StreamItem] = []
        self._waiting: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self.place = SeatPlace(trunk.id, number)
        self.request_id = request_id

    def put(self, item: StreamItem) -> None:
        """An item came."""
        self._items.append(item)
        self._wake()
        if len(self._items) >= MERGED_ITEMS:
            self._items = _merged(self._items)

    def fail(self, failure: Exception) -> None:
        """Nothing more will come."""
        self._failure = failure
        self._wake()

    async def next(self) -> StreamItem:
        """What has come, as one event; raises what ended the trunk."""
        while not self._items:
            if self._failure is not None:
                raise self._failure
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if len(self._items) > 1:
            self._items = _merged(self._items)
        return self._items.pop(0)

    def leave(self) -> None:
        """What still comes is dropped; may be called twice."""
        self._trunk.leave(self.place.number)

    def end_call(self, call: RequestCall) -> None:
        """The last item was read: ends the request's own call, too."""
        self.leave()
        self._trunk.end_call(call)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _merged(items: list[StreamItem]) -> list[StreamItem]:
    """Events become one; what is no event can only be the last item."""
    events = [item for item in items if isinstance(item, TokenEvent)]
    return [merged_events(events), *items[len(events) :]] if events else items


class _Trunk:
    """One trunk's seats."""

    def __init__(self, trunk_id: str, on_idle: Callable[[_Trunk], None]) -> None:
        self.id = trunk_id
        self.opened_s = time.monotonic()
        self.reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._seats: dict[int, Seat] = {}
        self._on_idle = on_idle
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def seat(self, request_id: str) -> Seat:
        """A new seat."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        number = next(self._numbers)
        seat = self._seats[number] = Seat(self, number, request_id)
        return seat

    def leave(self, number: int) -> None:
        """Gives a seat up; the trunk is idle some time after the last one was."""
        if self._seats.pop(number, None) is not None and not self._seats:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._on_idle, self)

    def end_call(self, call: RequestCall) -> None:
        """Reads a call whose stream has ended here to its own end. Nobody waits for that, and cancelling it would be
        one more call, and count as a cancelled request."""
        self._ending.add(task := asyncio.create_task(_read_end(call)))
        task.add_done_callback(self._ending.discard)

    def take(self, message: bytes) -> None:
        """Hands a message to the seats; what is for a seat that was left is dropped."""
        for number, said, num_generated in decode(message):
            seat = self._seats.get(number)
            if seat is not None:
                is_plain = isinstance(said, tuple)
                seat.put(TokenEvent(seat.request_id, said, num_generated) if is_plain else said)  # type: ignore[arg-type]

    def fail(self, failure: Exception) -> None:
        """Ends all seats."""
        for seat in self._seats.values():
            seat.fail(failure)


async def _read_end(call: RequestCall) -> None:
    try:
        async with asyncio.timeout(END_S):
            await anext(call, None)
    except Exception:
        logger.debug("the call of an ended stream failed", exc_info=True)
    finally:
        await call.aclose()


class Trunks:
    """The trunks of one Router to all workers of a model. ``open_call(replica_id, trunk_id)`` opens one; workers give
    up what ``router_id`` asked for when it is gone."""

    def __init__(self, open_call: Callable[[str, str], TrunkCall], router_id: str = "") -> None:
        self._open_call = open_call
        self._router_id = router_id
        self._open: set[_Trunk] = set()
        self._newest: dict[str, _Trunk] = {}
        # Opened for a request but not part of it: a trunk must not end, as its calls do, when it is cancelled.
        self._home = contextvars.copy_context()

    def __len__(self) -> int:
        return len(self._open)

    def seat(self, replica_id: str, request_id: str) -> Seat:
        """A seat for a request at a worker; opens a trunk there if none is open, or if that is old."""
        trunk = self._newest.get(replica_id)
        if trunk is None or time.monotonic() - trunk.opened_s > LONGEST_LIFE_S:
            trunk = _Trunk(new_trunk_id(self._router_id), lambda idle: self._close(replica_id, idle))
            self._newest[replica_id] = trunk
            self._open.add(trunk)
            reading = self._home.copy().run(asyncio.create_task, self._read(replica_id, trunk))
            trunk.reading = reading
        return trunk.seat(request_id)

    def close(self) -> None:
        """Closes all trunks; what has a seat there ends with WorkerLost."""
        self._newest.clear()
        for trunk in list(self._open):
            self._close("", trunk)

    def _close(self, replica_id: str, trunk: _Trunk) -> None:
        self._forget(replica_id, trunk)
        if trunk.reading is not None:
            trunk.reading.cancel()

    def _forget(self, replica_id: str, trunk: _Trunk) -> None:
        self._open.discard(trunk)
        if self._newest.get(replica_id) is trunk:
            del self._newest[replica_id]

    async def _read(self, replica_id: str, trunk: _Trunk) -> None:
        failure: Exception = WorkerLost("the worker ended its trunk")
        call: TrunkCall | None = None
        try:
            call = self._open_call(replica_id, trunk.id)
            async for message in call:
                if message:
                    trunk.take(message)
        except WorkerLost as error:
            failure = error
        except Exception as error:
            logger.warning("the trunk to worker %s broke", replica_id, exc_info=error)
            failure = WorkerLost(f"{type(error).__name__}: {error}")
        finally:
            self._forget(replica_id, trunk)
            trunk.fail(failure)
            if call is not None:
                await call.aclose()


def _is_last(item: StreamItem) -> bool:
    return item.finish_reason is not None if isinstance(item, TokenEvent) else isinstance(item, Refused)


class SeatedStream:
    """A request's items, from its own call and then from its seat; a
    :class:`serve_app.deployments.protocol.ReplicaStream`."""

    def __init__(self, call: RequestCall, seat: Seat) -> None:
        self._call = call
        self._seat = seat
        self._moved = False
        self._ended = False
        self._closed = False

    def __aiter__(self) -> SeatedStream:
        return self

    async def __anext__(self) -> StreamItem:
        if self._ended or self._closed:
            raise StopAsyncIteration
        if self._moved:
            item = await self._seat.next()
        else:
            said = await anext(self._call)
            self._moved = isinstance(said, Moved)
            item = said.event if isinstance(said, Moved) else said
        self._ended = _is_last(item)
        return item

    async def aclose(self) -> None:
        """Ends the request at its worker; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._ended:
            self._seat.end_call(self._call)
        else:
            self._seat.leave()
            await self._call.aclose()
