"""Clients that ask all the time and judge every answer: complete, refused or failed in so many words, cut, or lost."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

HANG_S = 40.0
"""An answer that brings nothing for so long is lost."""
PATIENT_S = 30.0
"""For so long a client tries again what was refused, failed or cut."""
RETRY_S = 0.5


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        outcomes: ``complete``; ``left`` (the client did, on purpose); ``refused`` (429 with Retry-After, and tried
            again); ``told`` (an error of the service in OpenAI's shape, as status or as last event); ``cut`` (the
            connection ended in the middle, as only the death of a Router can do it); ``lost``.
        lost: why, for each lost one.
        marred: when and how, for each one that was told or cut (monotonic clock).
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    marred: list[tuple[float, str, str]] = field(default_factory=list)

    def lose(self, why: str) -> None:
        """Counts a lost request."""
        self.outcomes["lost"] += 1
        self.lost.append(why)


class Cut(Exception):
    """The connection ended before the answer did."""


class Told(Exception):
    """The service said why it does not answer; ``status`` 200 is an error event in a stream."""

    def __init__(self, status: int, error: dict[str, Any], retry_after: str | None) -> None:
        super().__init__(error.get("message", ""))
        self.status = status
        self.code = str(error.get("code") or error.get("type"))
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Question:
    """One request: so many tokens exactly, so that a short answer shows."""

    prompt: str
    max_tokens: int
    stream: bool = True
    leave_after: int = 0
    """Events after which the client leaves; 0: it stays."""

    def body(self) -> dict[str, Any]:
        """As JSON."""
        more = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        messages = [{"role": "user", "content": self.prompt}]
        return {"messages": messages, "max_tokens": self.max_tokens, "ignore_eos": True, "seed": 1, **more}


async def ask(http: httpx.AsyncClient, question: Question) -> str:
    """``complete`` or ``left``; raises Told, Cut, or ValueError for an answer that is wrong."""
    try:
        if not question.stream:
            return await _ask_plain(http, question)
        async with http.stream("POST", "/v1/chat/completions", json=question.body()) as response:
            if response.status_code != 200:
                await response.aread()
                raise _told(response)
            return await _read_events(response, question)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError, httpx.WriteError) as error:
        raise Cut(f"{type(error).__name__}: {error}") from error


async def _ask_plain(http: httpx.AsyncClient, question: Question) -> str:
    response = await http.post("/v1/chat/completions", json=question.body())
    if response.status_code != 200:
        raise _told(response)
    _check_count(response.json()["usage"], question)
    return "complete"


def _told(response: httpx.Response) -> Told | Cut:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        # Not in the service's words: what stands in front of it answered in its place.
        return Cut(f"status {response.status_code}: {response.text[:100]!r}")
    return Told(response.status_code, error, response.headers.get("retry-after"))


async def _read_events(response: httpx.Response, question: Question) -> str:
    usage: dict[str, Any] = {}
    num_events = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            _check_count(usage, question)
            return "complete"
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise Told(200, chunk["error"], None)
        usage = chunk.get("usage") or usage
        num_events += 1
        if num_events == question.leave_after:
            return "left"
    raise Cut("the stream ended without [DONE]")


def _check_count(usage: dict[str, Any], question: Question) -> None:
    if usage.get("completion_tokens") != question.max_tokens:
        raise ValueError(f"{usage.get('completion_tokens')} tokens came, not {question.max_tokens}")


async def ask_and_judge(http: httpx.AsyncClient, question: Question, tally: Tally) -> None:
    """Asks until there is an answer: what was refused, failed or cut is tried again, as a good client does; each try is
    counted."""
    end_s = time.monotonic() + PATIENT_S
    while time.monotonic() < end_s:
        try:
            async with asyncio.timeout(HANG_S):
                tally.outcomes[await ask(http, question)] += 1
                return
        except Told as told:
            tally.outcomes["refused" if told.status == 429 else "told"] += 1
            if told.status != 429:
                tally.marred.append((time.monotonic(), "told", f"{told.status} {told.code}: {told}"))
            if told.status == 429 and not told.retry_after:
                tally.lose("429 without Retry-After")
                return
            if told.status < 429 and told.status != 200:
                tally.lose(f"{told.status}: {told}")
                return
        except Cut as cut:
            tally.outcomes["cut"] += 1
            tally.marred.append((time.monotonic(), "cut", str(cut)))
        except (TimeoutError, httpx.TimeoutException):
            tally.lose(f"nothing for {HANG_S:g} s")
            return
        except ValueError as error:
            tally.lose(str(error))
            return
        await asyncio.sleep(RETRY_S)
    tally.lose(f"no answer in {PATIENT_S:g} s of trying")


def new_client(url: str) -> httpx.AsyncClient:
    """An HTTP client for very many connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(HANG_S), limits=limits)


class Crowd:
    """So many clients that ask one question after another until told to stop."""

    def __init__(self, url: str, num_clients: int, seed: int, longest: int) -> None:
        self.tally = Tally()
        self._random = random.Random(seed)
        self._longest = longest
        self._http = new_client(url)
        self._stopping = False
        self._tasks = [asyncio.create_task(self._keep_asking(number)) for number in range(num_clients)]

    def question(self) -> Question:
        """A random one: most are streams that are read to the end, some clients leave, some do not stream."""
        draw = self._random.random()
        return Question(
            prompt=" ".join(
                f"word{self._random.randrange(99)}" for _ in range(self._random.randrange(2, 60))
            ),
            max_tokens=self._random.randrange(4, self._longest),
            stream=draw < 0.85,
            leave_after=self._random.randrange(1, 8) if draw < 0.15 else 0,
        )

    async def _keep_asking(self, number: int) -> None:
        while not self._stopping:
            await ask_and_judge(self._http, self.question(), self.tally)

    async def stop(self) -> None:
        """No new questions; returns when the last is answered."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()
