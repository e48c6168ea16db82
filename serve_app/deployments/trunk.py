"""A worker's end of a trunk: one call per Router that carries the later events of all its requests, many a message.

A message costs Serve about the same whatever is in it, and several times what reading one request's tokens costs. So a
request's own call brings the worker's answer and the first tokens, at once; then its stream moves onto the trunk of
the Router that asked, if there is one: it *takes a seat*. The seats take turns, one each per interval, and whatever is
due leaves together. No Ray here.
"""

from __future__ import annotations

import asyncio
import pickle
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from serve_app.deployments.protocol import StreamItem
from serve_app.policies.coalescing import rest_s
from worker.api import FinishReason, TokenEvent
from worker.errors import EngineDead

HELLO = b""
"""First message of a trunk: the worker knows it now."""
MESSAGE_TOKENS = 65_536
"""Most tokens of a message (some are more, if one stream has them): what has piled up behind a busy Router must stay
below the size that the transport carries."""
LOGPROBS_WEIGHT = 32
"""A token with log-probabilities counts as so many."""
GIVEN_UP = TokenEvent("", finish_reason=FinishReason.ABORT, error="the worker gave the request up")

Entry = tuple[int, tuple[int, ...] | StreamItem, int]
"""Of a message: a seat, its new tokens (or, where there is more to say, the whole item) and how many there are now."""


def new_trunk_id(router_id: str) -> str:
    """An id that nothing had before, and that says whose trunk it is."""
    return f"{router_id}/{uuid.uuid4().hex}"


def router_of(trunk_id: str) -> str:
    """The Router whose trunk it is."""
    return trunk_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class SeatPlace:
    """Where a Router reads a request's later events: its trunk, and a number that is unique there."""

    trunk_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Item of a request's own call: an event, and the news that all further ones come by the trunk."""

    event: TokenEvent


@runtime_checkable
class PolledEvents(Protocol):
    """Events of one request that can be taken without waiting; an engine's stream need not offer that."""

    def poll(self) -> TokenEvent | None:
        """What has come since the last event, as one; None for nothing."""
        ...


def encode(entries: Sequence[Entry]) -> bytes:
    """A message. Both ends are processes of one application, as with everything else that crosses between them."""
    return pickle.dumps(entries, pickle.HIGHEST_PROTOCOL)


def decode(message: bytes) -> Sequence[Entry]:
    """What :func:`encode` was given."""
    entries: Sequence[Entry] = pickle.loads(message)
    return entries


class OutgoingSeat:
    """One request's stream on a trunk. Leaving it does not end the request."""

    __slots__ = ("_ended", "due_s", "events", "last_item", "number")

    def __init__(
        self, number: int, events: PolledEvents, due_s: float, last_item: Callable[[TokenEvent], StreamItem]
    ) -> None:
        self.number = number
        self.events = events
        self.due_s = due_s
        self.last_item = last_item
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._ended.done()

    async def wait(self) -> None:
        """Waits until the last event is sent; EngineDead when the trunk ends before."""
        await self._ended

    def leave(self) -> None:
        """Sends nothing more; may be called at any time."""
        self._ended.cancel()

    def end(self) -> None:
        """The last event was sent."""
        self._ended.set_result(None)

    def fail(self) -> None:
        """The trunk has ended."""
        if not self._ended.done():
            self._ended.set_exception(EngineDead("The trunk has ended."))
            self._ended.exception()  # whoever leaves without waiting does not care


class OutgoingTrunk:
    """One trunk. ``interval_s`` answers the seconds between two events of one stream, as things are."""

    def __init__(self, interval_s: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._turns: deque[OutgoingSeat] = deque()
        self._overdue: list[OutgoingSeat] = []
        self._taken = asyncio.Event()
        self._open = True

    def take_seat(
        self, number: int, events: PolledEvents, last_item: Callable[[TokenEvent], StreamItem]
    ) -> OutgoingSeat:
        """From now on a request's events leave by this trunk; the last one as what ``last_item`` makes of it."""
        seat = OutgoingSeat(number, events, time.monotonic() + self._interval_s(), last_item)
        if not self._open:
            seat.fail()
        self._turns.append(seat)
        self._taken.set()
        return seat

    async def messages(self) -> AsyncIterator[bytes]:
        """The messages, until it is closed. Whoever stops to read must :meth:`close`."""
        yield HELLO
        while self._open:
            if not self._turns and not self._overdue:
                self._taken.clear()
                await self._taken.wait()
            entries = self._due(time.monotonic())
            if entries:
                yield encode(entries)
            await asyncio.sleep(rest_s(self._interval_s()))

    def close(self) -> None:
        """Ends the trunk, and with an error all that is carried."""
        self._open = False
        for seat in (*self._overdue, *self._turns):
            seat.fail()
        self._turns.clear()
        self._overdue.clear()
        self._taken.set()

    def _due(self, now_s: float) -> list[Entry]:
        """What the seats whose turn it is have to say. One that has nothing is asked again the next time."""
        asked, self._overdue = self._overdue, []
        while self._turns and self._turns[0].due_s <= now_s:
            asked.append(self._turns.popleft())
        next_s = now_s + self._interval_s()
        num_tokens = 0
        entries: list[Entry] = []
        for seat in asked:
            if seat.is_over:
                # Given up before its end: whoever still reads is told so. A Router whose client left does not.
                entries.append((seat.number, GIVEN_UP, 0))
                continue
            event = seat.events.poll() if num_tokens < MESSAGE_TOKENS else None
            if event is None:
                self._overdue.append(seat)
                continue
            num_tokens += len(event.token_ids) + LOGPROBS_WEIGHT * len(event.logprobs)
            if event.finish_reason is not None:
                entries.append((seat.number, seat.last_item(event), event.num_generated))
                seat.end()
                continue
            entries.append((seat.number, event if event.logprobs else event.token_ids, event.num_generated))
            seat.due_s = next_s
            self._turns.append(seat)
        return entries
