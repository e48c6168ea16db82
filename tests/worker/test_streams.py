"""Mailboxes between an engine's thread and its readers."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.eventually import ends
from worker.api import FinishReason, TokenEvent
from worker.engines.streams import EventStreams


def token(number: int, request_id: str = "a", last: bool = False) -> TokenEvent:
    reason = FinishReason.LENGTH if last else None
    return TokenEvent(request_id, token_ids=(number,), num_generated=number + 1, finish_reason=reason)


def no_abort(request_id: str) -> None:
    raise AssertionError(f"{request_id} was aborted")


def test_events_put_before_the_reader_came_are_kept_and_merged() -> None:
    async def read() -> list[TokenEvent]:
        streams = EventStreams()
        streams.open("a")
        for number in range(1000):
            streams.put(token(number, last=number == 999))
        events = [event async for event in streams.stream("a", no_abort)]
        assert "a" not in streams
        assert len(streams) == 0
        return events

    (event,) = asyncio.run(read())
    assert event.token_ids == tuple(range(1000))
    assert (event.num_generated, event.finish_reason) == (1000, FinishReason.LENGTH)


def test_a_waiting_reader_is_woken_from_another_thread() -> None:
    async def read() -> list[int]:
        streams = EventStreams()
        streams.open("a")
        reader = streams.stream("a", no_abort)
        first = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0.01)
        assert not first.done()
        thread = threading.Thread(target=lambda: [streams.put(token(n, last=n == 49)) for n in range(50)])
        thread.start()
        tokens = list((await ends(first)).token_ids)
        async for event in reader:
            tokens += event.token_ids
        thread.join()
        return tokens

    assert asyncio.run(read()) == list(range(50))


def test_a_step_wakes_the_loop_once_however_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read() -> int:
        streams = EventStreams()
        names = [f"r{number}" for number in range(100)]
        for name in names:
            streams.open(name)
        readers = [streams.stream(name, no_abort) for name in names]
        pending = [asyncio.ensure_future(anext(reader)) for reader in readers]
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        wake, calls = loop.call_soon_threadsafe, []

        def counted(callback: Callable[..., Any], *arguments: Any) -> Any:
            calls.append(1)
            return wake(callback, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        streams.put_all(token(0, name, last=True) for name in names)
        streams.put_all(token(1, name) for name in names)  # behind the last event: dropped
        assert [event.token_ids for event in await asyncio.gather(*pending)] == [(0,)] * 100
        return len(calls)

    assert asyncio.run(read()) == 1


def test_nothing_comes_after_the_last_event() -> None:
    async def read() -> list[TokenEvent]:
        streams = EventStreams()
        streams.open("a")
        streams.put(token(0, last=True))
        streams.put(token(1))
        streams.put(token(2, "stranger"))
        streams.finish_all(FinishReason.ERROR, "too late")
        return [event async for event in streams.stream("a", no_abort)]

    assert asyncio.run(read()) == [token(0, last=True)]


def test_finish_all_ends_open_streams_behind_what_they_still_hold() -> None:
    async def read() -> TokenEvent:
        streams = EventStreams()
        streams.open("a")
        streams.put(token(0))
        streams.finish_all(FinishReason.ERROR, "broken")
        (event,) = [event async for event in streams.stream("a", no_abort)]
        return event

    event = asyncio.run(read())
    assert (event.token_ids, event.finish_reason, event.error) == ((0,), FinishReason.ERROR, "broken")
    assert event.num_generated == 1, "the tokens that came are still counted"


def test_one_reader_per_stream_and_one_stream_per_id() -> None:
    async def read() -> None:
        streams = EventStreams()
        streams.open("a")
        with pytest.raises(ValueError, match="in use"):
            streams.open("a")
        with pytest.raises(KeyError):
            streams.stream("b", no_abort)
        reader = streams.stream("a", lambda _: None)
        with pytest.raises(RuntimeError, match="has a reader"):
            streams.stream("a", no_abort)
        await reader.aclose()
        streams.open("a")

    asyncio.run(read())


@pytest.mark.parametrize("way", ["close", "cancel", "forget"])
def test_leaving_early_aborts_once_and_forgets_the_stream(way: str) -> None:
    async def leave() -> list[str]:
        streams = EventStreams()
        aborted: list[str] = []
        streams.open("a")
        reader = streams.stream("a", aborted.append)
        if way == "close":
            await reader.aclose()
            await reader.aclose()
        elif way == "cancel":
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            with pytest.raises(StopAsyncIteration):
                await anext(reader)
        else:
            del reader
            gc.collect()
            await asyncio.sleep(0)
        assert "a" not in streams
        return aborted

    assert asyncio.run(leave()) == ["a"]


def test_a_reader_that_outlives_its_loop_still_aborts() -> None:
    streams = EventStreams()
    aborted: list[str] = []
    streams.open("a")

    async def make() -> Any:
        return streams.stream("a", aborted.append)

    reader = asyncio.run(make())
    streams.put(token(0))  # its loop is closed: nobody to wake, and no error
    del reader
    gc.collect()
    assert aborted == ["a"]
    assert len(streams) == 0


def test_polling_takes_what_is_there_and_no_event_wakes_a_reader_that_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read() -> list[TokenEvent | None]:
        streams = EventStreams()
        streams.open("a")
        reader = streams.stream("a", no_abort)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_soon_threadsafe", None)  # a wake-up would fail on this
        polled = [reader.poll()]
        for number in range(100):
            streams.put(token(number))
        polled.append(reader.poll())
        polled.append(reader.poll())
        streams.put(token(100, last=True))
        polled += [reader.poll(), reader.poll()]
        assert "a" not in streams
        monkeypatch.undo()
        return polled

    before, many, none, last, after = asyncio.run(read())
    assert (before, none, after) == (None, None, None)
    assert many is not None
    assert (many.token_ids, many.num_generated) == (tuple(range(100)), 100)
    assert last == token(100, last=True)


def test_a_reader_may_wait_after_it_has_polled() -> None:
    async def read() -> TokenEvent:
        streams = EventStreams()
        streams.open("a")
        reader = streams.stream("a", no_abort)
        assert reader.poll() is None
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        streams.put(token(0, last=True))
        return await ends(waiting)

    assert asyncio.run(read()) == token(0, last=True)
