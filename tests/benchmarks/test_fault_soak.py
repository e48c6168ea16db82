"""What the fault soak counts: a fault may mar what it is known to mar, for a while, and nothing else is explained."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.drills.clients import Cut, Question, Told, ask
from benchmarks.drills.heartbeat import HOPS, MOST_S, Heartbeat
from benchmarks.fault_soak import Outcome, figures_of, unexplained

STREAM = 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n'
DONE = "data: [DONE]\n\n"


async def _asked(status: int, body: str, question: Question, headers: dict[str, str] | None = None) -> str:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body, headers=headers))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await ask(http, question)


def judge(status: int, body: str, question: Question, **more: str) -> str:
    """How an answer is judged."""
    try:
        return asyncio.run(_asked(status, body, question, more or None))
    except Told as told:
        return f"told {told.status} {told.code} {told.retry_after}"
    except Cut:
        return "cut"
    except ValueError:
        return "wrong"


@pytest.mark.parametrize(
    ("status", "body", "judged"),
    [
        (200, STREAM + USAGE % 3 + DONE, "complete"),
        (200, STREAM + USAGE % 2 + DONE, "wrong"),
        (200, STREAM + USAGE % 3, "cut"),
        (200, STREAM + DONE, "wrong"),
        (
            200,
            STREAM + 'data: {"error":{"message":"m","code":"worker_failed"}}\n\n',
            "told 200 worker_failed None",
        ),
        (
            503,
            json.dumps({"error": {"message": "m", "code": "worker_failed"}}),
            "told 503 worker_failed None",
        ),
        (500, "Internal Server Error", "cut"),
    ],
)
def test_answers_are_judged(status: int, body: str, judged: str) -> None:
    assert judge(status, body, Question("hello", 3)) == judged


def test_a_refusal_brings_its_time_and_a_client_that_leaves_has_left() -> None:
    refused = json.dumps({"error": {"message": "m", "code": "overloaded"}})
    assert judge(429, refused, Question("hello", 3), **{"retry-after": "2"}) == "told 429 overloaded 2"
    assert judge(200, STREAM * 5, Question("hello", 9, leave_after=2)) == "left"


@pytest.mark.parametrize("late_s", [0.0, 0.3, 60.0])
def test_what_is_late_for_the_machines_sake_is_allowed_for(late_s: float) -> None:
    async def late(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(late_s)
        return httpx.Response(200)

    async def allowance_s() -> float:
        transport = httpx.MockTransport(late)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            async with Heartbeat(http) as heart:
                await asyncio.sleep(0.4)
            return heart.allowance_s

    # A beat that has not ended counts, too, and nothing is excused for more than a bound.
    assert HOPS * min(late_s, 0.3) <= asyncio.run(allowance_s()) <= MOST_S
    assert late_s or any(asyncio.run(allowance_s()) < 0.3 for _ in range(10)), "nothing is late"


def test_a_fault_explains_what_it_may_mar_and_for_a_while_only() -> None:
    spans = [
        (10.0, 12.0, "router_killed"),
        (30.0, 31.0, "worker_killed_in_mid_stream"),
        (50.0, 51.0, "queue_full"),
    ]
    marred = [
        (11.0, "cut", "a"),
        (11.0, "told", "b"),
        (25.0, "cut", "c"),
        (31.0, "told", "d"),
        (50.5, "told", "e"),
    ]
    found = unexplained(marred, spans, 0.0)
    assert [line[-1] for line in found] == ["b", "c", "e"]


def test_what_is_lost_or_left_is_a_problem() -> None:
    memory = [{"Router": 100.0, "Worker": 200.0, "proxy": 50.0} for _ in range(30)]
    sound = Outcome(memory_mb=memory)
    assert sound.problems() == []
    grown = [{**parts, "proxy": 50.0 + 3 * number} for number, parts in enumerate(memory)]
    assert Outcome(memory_mb=grown).problems() == ["memory grew by 60 MB"]
    assert Outcome(memory_mb=grown[::3]).problems() == [], "a short run sees processes warm up"
    bad = Outcome(
        lost=["x"], broken=["y"], leaked_bytes=1, leaked_pages=1, leaked_requests=2, open_bookings=1
    )
    assert len(bad.problems()) == 5
    figures = figures_of({"default": bad, "haproxy": sound})
    assert (figures["lost"], figures["broken_promises"], figures["leaked_pages"]) == (1, 1, 1)
