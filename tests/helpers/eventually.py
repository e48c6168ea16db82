"""Waiting for what must come true: looks again and again, for a generous while, and says what it saw last.

A state that another process, thread or task brings about is never read once: on a busy machine it may not be there yet.
How long something may take is a promise of the product or none; where it is one, a test measures it against what the
machine managed meanwhile (:class:`benchmarks.drills.heartbeat.Heartbeat`), never against the bare clock.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

Seen = TypeVar("Seen")

PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "30"))
"""Whatever takes longer than this hangs, however busy the machine is. Less where a failure is what is waited for."""


def eventually(
    look: Callable[[], Seen],
    holds: Callable[[Seen], bool] = bool,
    *,
    within_s: float = PATIENCE_S,
    pause_s: float = 0.02,
) -> Seen:
    """Looks until what is seen holds, and answers it; AssertionError with what was seen last after ``within_s``."""
    for _ in _turns(within_s):
        seen = look()
        if holds(seen):
            return seen
        time.sleep(pause_s)
    raise AssertionError(f"it never came true; last seen: {seen!r}")


async def soon(
    look: Callable[[], Seen | Awaitable[Seen]],
    holds: Callable[[Seen], bool] = bool,
    *,
    within_s: float = PATIENCE_S,
    pause_s: float = 0.002,
) -> Seen:
    """As :func:`eventually`, but the event loop goes on turning; looking may take an ``await``."""
    for _ in _turns(within_s):
        looked = look()
        seen = await looked if inspect.isawaitable(looked) else looked
        if holds(seen):
            return seen
        await asyncio.sleep(pause_s)
    raise AssertionError(f"it never came true; last seen: {seen!r}")


async def some_turns() -> None:
    """Lets the event loop do what is ready to be done, also what that makes ready; for looking that nothing happened,
    and where what is to have happened cannot be seen."""
    for _ in range(10):
        await asyncio.sleep(0.005)


async def ends(waiting: Awaitable[Seen], within_s: float = PATIENCE_S) -> Seen:
    """The result of what must not hang; TimeoutError after ``within_s``."""
    async with asyncio.timeout(within_s):
        return await waiting


def _turns(within_s: float) -> Iterator[None]:
    """Until the time is over, and at least twice: a process that was stopped meanwhile looks once more."""
    end_s = time.monotonic() + within_s
    yield
    yield
    while time.monotonic() < end_s:
        yield
