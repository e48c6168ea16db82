"""A client of the completions API: so many streamed requests at once, each followed by the next, and what it saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

EVENT = b"data: "


@dataclass
class Answered:
    """One request: when it was sent, when each message with text came, and what the service counted."""

    sent_s: float
    came_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    failure: str = ""

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.came_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Time between messages."""
        return [after - before for before, after in pairwise(self.came_s)]

    @property
    def per_token_s(self) -> float:
        """Time per output token behind the first."""
        return (self.came_s[-1] - self.came_s[0]) / max(1, self.num_tokens - 1)


def request_bytes(model: str, prompt: Sequence[int], num_new: int) -> bytes:
    """A streamed completion of ``num_new`` tokens over HTTP/1.1."""
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": num_new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, request: bytes) -> Answered:
    """Sends a request and reads its events to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    answered = Answered(time.perf_counter())
    try:
        writer.write(request)
        status = (await reader.readline()).decode(errors="replace").strip()
        if " 200 " not in f"{status} ":
            answered.failure = status
            return answered
        async for line in reader:
            if not line.startswith(EVENT):
                continue
            data = line[len(EVENT) :].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if event.get("error"):
                answered.failure = str(event["error"])
                return answered
            if any(choice.get("text") for choice in event.get("choices", [])):
                answered.came_s.append(time.perf_counter())
            if event.get("usage"):
                answered.num_tokens = event["usage"]["completion_tokens"]
        if not answered.came_s:
            answered.failure = "no text came"
    finally:
        writer.close()
    return answered


async def _loop(port: int, requests: list[bytes], concurrency: int) -> list[Answered]:
    waiting, found = list(reversed(requests)), []

    async def client() -> None:
        while waiting:
            found.append(await ask(port, waiting.pop()))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return found


def closed_loop(port: int, requests: Sequence[bytes], concurrency: int) -> tuple[list[Answered], float]:
    """The answers, and the seconds that all took together."""
    started_s = time.perf_counter()
    found = asyncio.run(_loop(port, list(requests), concurrency))
    return found, time.perf_counter() - started_s
