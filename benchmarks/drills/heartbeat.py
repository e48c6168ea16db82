"""How late the machine is while something is measured: a small request again and again, and the longest it took."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import TracebackType

import httpx

PAUSE_S = 0.05
HOPS = 3
"""What is timed passes through some more processes than a beat does, each of which waits for its turn on a busy
machine."""
MOST_S = 4.0
"""However late the machine is: a Router that stands still does not excuse itself."""


class Heartbeat:
    """Beats while it is open::

        async with Heartbeat(http) as heart:
            ...
        promised_s + heart.allowance_s

    A service that waits for a worker does not beat slowly: ``GET /health`` touches none.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._task: asyncio.Task[None] | None = None
        self._since_s = 0.0
        self._longest_s = 0.0

    async def __aenter__(self) -> Heartbeat:
        self._since_s = time.monotonic()
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note()
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def allowance_s(self) -> float:
        """By how much something that was timed meanwhile may have been late for the machine's sake."""
        return min(HOPS * self._longest_s, MOST_S)

    def _note(self) -> None:
        self._longest_s = max(self._longest_s, time.monotonic() - self._since_s - PAUSE_S)

    async def _beat(self) -> None:
        while True:
            # A Router that was killed answers nothing; how long it took to say so counts all the same.
            with suppress(httpx.HTTPError):
                await self._http.get("/health")
            await asyncio.sleep(PAUSE_S)
            self._note()
            self._since_s = time.monotonic()
