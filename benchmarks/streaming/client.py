"""Holds many token streams open at once, counts what arrives and when, and tells nothing else apart.

Every stream asks for so many tokens, and is followed by another one in its place. The first ones are of all lengths, so
that from then on streams begin and end evenly. Tokens are letters, so a message's tokens are the characters of its
text. Nothing is parsed as JSON: the client shares the machine with what it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

STILL_S = 2.0
"""A stream that brings nothing for so long has failed."""
TEXT_MARK = b'"text":"'
EVENT_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Load:
    """What the client does: so many streams at once, each of ``tokens_per_stream`` tokens, opened evenly over
    ``ramp_s``; measured from then on, after ``settle_s``, for ``measured_s``."""

    port: int
    num_streams: int
    tokens_per_stream: int
    ramp_s: float = 2.0
    settle_s: float = 2.0
    measured_s: float = 8.0


@dataclass(slots=True)
class Measured:
    """What was seen in the measured time. ``gaps_s`` lie between two messages of one stream; ``sizes`` are tokens per
    message; ``failures`` are streams that ended with other than what they should have brought; ``cpu_s`` is processor
    time by kind of process."""

    num_tokens: int = 0
    num_messages: int = 0
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(
        self, request: bytes, window: tuple[float, float], measured: Measured, ended: asyncio.Future[int]
    ) -> None:
        self._request = request
        self._window = window
        self._measured = measured
        self._ended = ended
        self._buffer = b""
        self._asked_s = 0.0
        self._last_s = 0.0
        self.num_tokens = 0

    def still_s(self, now_s: float) -> float:
        """For how long nothing has come."""
        return now_s - max(self._asked_s, self._last_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._asked_s = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        events, end, rest = (self._buffer + data).rpartition(EVENT_END)
        self._buffer = rest
        if not end:
            return
        for event in events.split(EVENT_END):
            start = event.find(TEXT_MARK)
            if start >= 0:
                start += len(TEXT_MARK)
                self._arrived(event.index(b'"', start) - start, now_s)
        if b"data: [DONE]" in events[-64:] and not self._ended.done():
            self._ended.set_result(self.num_tokens)

    def _arrived(self, num_tokens: int, now_s: float) -> None:
        self.num_tokens += num_tokens
        began, over = self._window
        if began <= now_s < over and num_tokens:
            measured = self._measured
            measured.num_tokens += num_tokens
            measured.num_messages += 1
            measured.sizes.append(num_tokens)
            if self._last_s:
                measured.gaps_s.append(now_s - self._last_s)
            elif self._asked_s >= began:
                measured.first_token_s.append(now_s - self._asked_s)
        self._last_s = now_s

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(self.num_tokens)


def first_length(load: Load, number: int) -> int:
    """Tokens of the first stream in place ``number``."""
    return max(1, load.tokens_per_stream * (number + 1) // load.num_streams)


def request_bytes(num_tokens: int) -> bytes:
    """A streamed completion over HTTP/1.1."""
    body = json.dumps(
        {
            "model": "paced",
            "prompt": "Say letters.",
            "max_tokens": num_tokens,
            "stream": True,
            "temperature": 0,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _keep_streaming(load: Load, number: int, window: tuple[float, float], measured: Measured) -> None:
    await asyncio.sleep(load.ramp_s * number / load.num_streams)
    loop = asyncio.get_running_loop()
    num_tokens = first_length(load, number)
    while time.monotonic() < window[1]:
        ended: asyncio.Future[int] = loop.create_future()
        make = partial(_Stream, request_bytes(num_tokens), window, measured, ended)
        transport, stream = await loop.create_connection(make, "127.0.0.1", load.port)
        try:
            done, _ = await asyncio.wait([ended], timeout=max(0.1, window[1] + 0.5 - time.monotonic()))
        finally:
            transport.abort()
        if done and ended.result() != num_tokens:
            measured.failures.append(f"a stream brought {ended.result()} of {num_tokens} tokens")
            await asyncio.sleep(0.1)
        elif not done and (still_s := stream.still_s(time.monotonic())) > STILL_S:
            measured.failures.append(f"a stream stood still for {still_s:.1f} s")
        num_tokens = load.tokens_per_stream


async def measure(load: Load, cpu_seconds: Callable[[], dict[str, float]]) -> Measured:
    """Runs the load once; ``cpu_seconds`` is read at both ends of the measured time."""
    measured = Measured()
    began = time.monotonic() + load.ramp_s + load.settle_s
    window = (began, began + load.measured_s)
    streams = asyncio.gather(
        *[_keep_streaming(load, number, window, measured) for number in range(load.num_streams)]
    )
    await asyncio.sleep(window[0] - time.monotonic())
    before = cpu_seconds()
    await asyncio.sleep(window[1] - time.monotonic())
    measured.cpu_s = {kind: used - before.get(kind, 0.0) for kind, used in cpu_seconds().items()}
    await streams
    return measured


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lies; ValueError for none."""
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
