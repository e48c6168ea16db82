"""How tests wait: until it is true, for a bounded while, and never by a single look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.helpers.eventually import ends, eventually, soon


def counting() -> Callable[[], int]:
    """Answers 1, 2, 3, ..."""
    numbers = iter(range(1, 1000))
    return lambda: next(numbers)


def test_waiting_answers_what_held() -> None:
    assert eventually(counting(), lambda number: number == 3, pause_s=0.0) == 3

    async def looking() -> tuple[int, int]:
        look = counting()

        async def ask() -> int:
            return look()

        return await soon(ask, lambda number: number == 3), await soon(look, lambda number: number > 3)

    assert asyncio.run(looking()) == (3, 4)


def test_what_never_comes_true_is_said_with_what_was_seen_last() -> None:
    for wait in (eventually, lambda *given, **more: asyncio.run(soon(*given, **more))):
        # However little time is left, there is a second look: the first may have been before a long standstill.
        with pytest.raises(AssertionError, match="last seen: 2"):
            wait(counting(), lambda number: number > 2, within_s=0.0)
        assert wait(counting(), lambda number: number == 2, within_s=0.0) == 2


def test_what_hangs_is_ended() -> None:
    async def hang() -> None:
        await ends(asyncio.sleep(3600), within_s=0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(hang())
