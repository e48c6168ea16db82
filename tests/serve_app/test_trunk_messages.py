"""What a worker puts into a trunk's messages, and how much."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from serve_app.deployments import trunk
from serve_app.deployments.protocol import Refused, StreamItem
from serve_app.deployments.trunk import OutgoingTrunk, decode
from tests.helpers.eventually import ends
from worker.api import FinishReason, TokenEvent, TokenLogprobs
from worker.errors import InvalidRequest


def event(number: int, *ids: int, last: bool = False) -> TokenEvent:
    return TokenEvent("r", ids, number, finish_reason=FinishReason.LENGTH if last else None)


@dataclass
class Said:
    """A stream that says what the test puts in."""

    events: list[TokenEvent] = field(default_factory=list)

    def poll(self) -> TokenEvent | None:
        return self.events.pop(0) if self.events else None


def unchanged(last: TokenEvent) -> StreamItem:
    return last


def test_logprobs_and_refusals_cross_whole() -> None:
    async def run() -> None:
        outgoing = OutgoingTrunk(lambda: 0.0)
        entry = TokenLogprobs(7, -0.5, ((7, -0.5), (8, -1.5)))
        rich = TokenEvent("r", (7,), 3, (entry,))
        outgoing.take_seat(4, Said([rich]), unchanged)
        refused = Refused(InvalidRequest("response_format", "cannot be"), None)
        outgoing.take_seat(5, Said([event(9, 1, last=True)]), lambda last: refused)
        messages = outgoing.messages()
        assert await anext(messages) == b""
        [first, second] = decode(await ends(anext(messages)))
        assert first == (4, rich, 3)
        assert isinstance(second[1], Refused)
        assert second[1].error.args == refused.error.args
        await messages.aclose()

    asyncio.run(run())


class Looks:
    """A clock that goes on by a hundredth of a second with each look at it."""

    num_looks = 0

    def monotonic(self) -> float:
        self.num_looks += 1
        return self.num_looks / 100


def test_a_stream_that_always_has_a_token_has_its_turn_once_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks()
    monkeypatch.setattr(trunk, "time", looks)
    monkeypatch.setattr(trunk, "rest_s", lambda interval_s: 0.0)

    async def run() -> list[int]:
        outgoing = OutgoingTrunk(lambda: 0.095)
        outgoing.take_seat(1, Said([event(n, n) for n in range(100)]), unchanged)
        messages = outgoing.messages()
        await anext(messages)
        sent_at = []
        for _ in range(5):
            await ends(anext(messages))
            sent_at.append(looks.num_looks)
        await messages.aclose()
        return sent_at

    assert asyncio.run(run()) == [11, 21, 31, 41, 51]


def test_what_has_piled_up_leaves_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk, "MESSAGE_TOKENS", 100)

    async def run() -> list[int]:
        outgoing = OutgoingTrunk(lambda: 0.0)
        for number in range(20):
            outgoing.take_seat(number, Said([event(30, *range(30), last=True)]), unchanged)
        messages = outgoing.messages()
        await anext(messages)
        sizes, seen = [], []
        while len(seen) < 20:
            entries = decode(await ends(anext(messages)))
            sizes.append(sum(len(said.token_ids) for _, said, _ in entries if isinstance(said, TokenEvent)))
            seen += [number for number, _, _ in entries]
        assert sorted(seen) == list(range(20))
        await messages.aclose()
        return sizes

    sizes = asyncio.run(run())
    assert max(sizes) <= 130
    assert sum(sizes) == 600


def test_a_call_that_the_worker_ends_early_is_told_on_the_trunk() -> None:
    async def run() -> None:
        outgoing = OutgoingTrunk(lambda: 0.0)
        seat = outgoing.take_seat(3, Said(), unchanged)
        messages = outgoing.messages()
        await anext(messages)
        seat.leave()
        [(number, said, _)] = decode(await ends(anext(messages)))
        assert number == 3
        assert isinstance(said, TokenEvent)
        assert said.finish_reason is FinishReason.ABORT
        await messages.aclose()

    asyncio.run(run())
