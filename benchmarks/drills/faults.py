"""The faults that befall a service, and what must hold under each; what does not hold is a :class:`Broken` promise."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from benchmarks.drills.clients import Cut, Question, Told, ask
from benchmarks.drills.heartbeat import Heartbeat
from benchmarks.drills.service import Service

TELL_S = 1.0
"""A stream whose worker dies ends with an error event within so long."""
NOTICE_S = 8.0
"""The same where the worker only stands still: five seconds of silence, and the time to look."""
REPLACED_S = 120.0
PROMPT_S = 0.9
"""A prompt of the longest question takes longer than this."""
GONE_S = 20.0
"""Requests whose clients left are gone by then; left alone they would run for much longer."""
TRIES = 3
"""Of what a busy machine can spoil without a promise being broken."""
MUTE_S = 7.0
SLOW_READERS = 8
SLOW_TOKENS = 1000
SLOW_BYTES = 48 << 20
"""What readers that do not read may cost in front of the workers, all of them together. Workers merge what is not
read; their memory is looked at over the whole run."""


class Broken(Exception):
    """A promise was not kept."""


@dataclass
class Drill:
    """What faults act on. ``num_clients``: how many others ask all the time; ``num_workers``, ``num_routers``: how many
    there are while nothing is amiss."""

    service: Service
    http: httpx.AsyncClient
    num_clients: int
    num_workers: int
    num_routers: int
    tell_s: list[float] = field(default_factory=list)
    """Seconds from a worker's death to the error event of each of its streams."""
    slow_bytes: list[int] = field(default_factory=list)

    async def outcome(self, question: Question) -> tuple[str, float]:
        """How one request ended, and when (monotonic clock)."""
        try:
            found = await ask(self.http, question)
        except Told as told:
            found = f"told {told.status} {told.code}"
        except Cut:
            found = "cut"
        except (TimeoutError, httpx.TimeoutException):
            found = "hung"
        except ValueError as error:
            found = str(error)
        return found, time.monotonic()

    async def whole(self) -> None:
        """Waits until what was killed is replaced."""
        await asyncio.to_thread(self.service.wait_until_whole, self.num_workers, self.num_routers, REPLACED_S)

    def begin(self, count: int, question: Question) -> list[asyncio.Task[tuple[str, float]]]:
        """Asks so many times at once."""
        return [asyncio.create_task(self.outcome(question)) for _ in range(count)]


def _expect(found: list[tuple[str, float]], *allowed: str) -> None:
    wrong = [outcome for outcome, _ in found if outcome not in allowed]
    if wrong:
        raise Broken(
            f"{len(wrong)} of {len(found)} requests: {wrong[0]}, where only {', '.join(allowed)} may be"
        )


LOST_IN_STREAM = "told 200 worker_failed"


async def worker_killed_before_first_tokens(drill: Drill) -> None:
    """Nobody notices: what had no token yet is computed elsewhere. Where the machine was so slow that tokens may have
    come before the kill, it is tried again."""
    for _ in range(TRIES):
        began_s = time.monotonic()
        # Unlike prompts, and others at each try: one whose prefix a worker has is answered at once.
        asked = [
            task for n in range(8) for task in drill.begin(1, Question(f"{began_s} {n} " + "word " * 600, 6))
        ]
        await asyncio.sleep(0.3)
        drill.service.kill("Worker")
        in_time = time.monotonic() - began_s < PROMPT_S
        # The prompts take a second and more; one that was quicker may have begun.
        found = await asyncio.gather(*asked)
        _expect(found, "complete", LOST_IN_STREAM)
        if sum(outcome == LOST_IN_STREAM for outcome, _ in found) <= 2:
            return
        if in_time:
            raise Broken("requests that had no token yet were failed")
        await drill.whole()
    raise Broken(f"the worker was killed too late {TRIES} times")


async def worker_killed_in_mid_stream(drill: Drill) -> None:
    """Its streams end with an error event, soon, and cleanly; the others run on. Where all streams were at another
    worker (one that was begun a moment ago is asked last), that one is killed too, once the first is replaced."""
    for index in (0, -1):
        # Unlike prompts: a shared one would be answered where its prefix is.
        asked = [task for n in range(8) for task in drill.begin(1, Question(f"{n} hello", 300))]
        await asyncio.sleep(0.7)
        async with Heartbeat(drill.http) as heart:
            killed_s = time.monotonic()
            drill.service.kill("Worker", index)
            await asyncio.sleep(TELL_S)
        found = await asyncio.gather(*asked)
        _expect(found, "complete", LOST_IN_STREAM)
        told_s = [at_s - killed_s for outcome, at_s in found if outcome == LOST_IN_STREAM]
        drill.tell_s += told_s
        if told_s and max(told_s) > TELL_S + heart.allowance_s:
            raise Broken(f"an error event came {max(told_s):.2f} s after the worker's death")
        if told_s:
            return
        await drill.whole()
    raise Broken("no stream noticed the death of its worker")


async def router_killed(drill: Drill) -> None:
    """Its streams are cut, there being nobody to say more; those of the other run on, and new requests are served."""
    asked = drill.begin(8, Question("hello", 80))
    await asyncio.sleep(1.0)
    drill.service.kill("Router")
    _expect(await asyncio.gather(*asked), "complete", "cut")
    for _ in range(20):
        found = await asyncio.gather(*drill.begin(4, Question("hello", 4)))
        if all(outcome == "complete" for outcome, _ in found):
            return
        _expect(found, "complete", "cut")
        await asyncio.sleep(0.5)
    raise Broken("ten seconds after the death of one Router the other did not serve")


async def pushes_stopped(drill: Drill) -> None:
    """Workers that push nothing for longer than silent ones live are asked, and serve on."""
    muting = asyncio.create_task(asyncio.to_thread(drill.service.mute, MUTE_S))
    end_s = time.monotonic() + MUTE_S
    while time.monotonic() < end_s:
        _expect(await asyncio.gather(*drill.begin(4, Question("hello", 20))), "complete")
    await muting


async def worker_stalled(drill: Drill) -> None:
    """A process that stands still loses its streams to an error event; requests without a token go elsewhere."""
    asked = drill.begin(8, Question("hello", 100))
    await asyncio.sleep(0.5)
    pid = drill.service.pids("Worker")[0]
    os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        async with Heartbeat(drill.http) as heart:
            asked += drill.begin(4, Question("word " * 100, 5))
            found = await asyncio.gather(*asked)
    finally:
        os.kill(pid, signal.SIGCONT)
    _expect(found, "complete", LOST_IN_STREAM)
    if (last_s := max(at_s for _, at_s in found) - stopped_s) > NOTICE_S + heart.allowance_s:
        raise Broken(f"a request at the stalled worker ended only {last_s:.1f} s later")


async def clients_gone(drill: Drill) -> None:
    """Whoever leaves frees its place at once: left alone these would run for minutes."""
    asked = drill.begin(12, Question("hello", 3000, leave_after=2))
    _expect(await asyncio.gather(*asked), "left")
    # Each of the others has one request at most; what is more than that was left behind.
    end_s = time.monotonic() + GONE_S
    while True:
        snapshots = await asyncio.to_thread(drill.service.snapshots)
        live = sum(s.num_running + s.num_waiting for s in snapshots)
        if live <= drill.num_clients:
            return
        if time.monotonic() > end_s:
            raise Broken(f"{live} requests run, of {drill.num_clients} clients")
        await asyncio.sleep(0.2)


async def slow_readers(drill: Drill) -> None:
    """Readers that do not read cost their own answers and no more, and nobody else's time."""
    before = _front_bytes(drill)
    connections = [_connection(drill.service.url) for _ in range(SLOW_READERS)]
    try:
        end_s = time.monotonic() + 4.0
        while time.monotonic() < end_s:
            _expect(await asyncio.gather(*drill.begin(4, Question("hello", 20))), "complete")
        grown = _front_bytes(drill) - before
    finally:
        for connection in connections:
            connection.close()
    drill.slow_bytes.append(grown)
    if grown > SLOW_BYTES:
        raise Broken(f"{SLOW_READERS} readers that do not read cost {grown >> 20} MiB")


def _front_bytes(drill: Drill) -> int:
    return sum(used for part, used in drill.service.memory_bytes().items() if part != "Worker")


def _connection(url: str) -> socket.socket:
    """Asks for a long stream by hand, and never reads."""
    where = urlsplit(url)
    question = Question("hello", SLOW_TOKENS)
    request = httpx.Request("POST", url + "/v1/chat/completions", json=question.body())
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((where.hostname, where.port))
    made.sendall(f"POST {where.path}/v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return made


async def queue_full(drill: Drill) -> None:
    """Past the queue's bound there is a 429 that says when to come again, and nothing else goes wrong."""
    for _ in range(TRIES):
        found = await asyncio.gather(*drill.begin(240, Question("hello", 40)))
        _expect(found, "complete", "told 429 overloaded")
        refused = sum(outcome != "complete" for outcome, _ in found)
        if refused == len(found):
            raise Broken("all of them were refused")
        if refused:
            return
        # A machine that is slow to ask is answered as fast as it asks.
    raise Broken(f"none of {len(found)} was refused, {TRIES} times")


async def redeployed(drill: Drill) -> None:
    """New processes take over under load; what runs on the old ones runs to its end."""
    old = set(drill.service.pids("Worker"))
    # Longer than a worker goes on before it asks whether a Router that it hears no more of is dead.
    asked = drill.begin(8, Question("hello", 400))
    await asyncio.sleep(0.3)
    queue = drill.service.options.get("max_queue", 32)
    await asyncio.to_thread(drill.service.deploy, max_queue=queue + 1, worker_backlog=8 + queue % 2)
    _expect(await asyncio.gather(*asked), "complete")
    if set(drill.service.pids("Worker")) <= old:
        raise Broken("no worker was replaced")


async def worker_drained(drill: Drill) -> None:
    """An operator takes a worker away: its streams end, and another takes its place."""
    asked = drill.begin(8, Question("hello", 80))
    await asyncio.sleep(0.3)
    before = drill.service.pids("Worker")
    leaving = (await asyncio.to_thread(drill.service.arrivals))[0].replica
    response = await drill.http.post("/admin/drain", json={"replica": leaving, "timeout_s": 20})
    if response.status_code == 403:
        # Behind HAProxy nobody is known to be on this machine, and this service has no keys.
        aborted = await asyncio.to_thread(drill.service.drain, leaving, 20.0)
    elif response.status_code == 200:
        aborted = response.json()["data"][0].get("aborted")
    else:
        raise Broken(f"draining answered {response.status_code}: {response.text[:200]}")
    if aborted != 0:
        raise Broken(f"draining aborted {aborted} requests")
    _expect(await asyncio.gather(*asked), "complete")
    end_s = time.monotonic() + 20.0
    while set(before) <= set(drill.service.pids("Worker")):
        if time.monotonic() > end_s:
            raise Broken("a drained worker was not replaced")
        await asyncio.sleep(0.2)


Fault = Callable[[Drill], Awaitable[None]]

FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        worker_killed_before_first_tokens,
        worker_killed_in_mid_stream,
        router_killed,
        pushes_stopped,
        worker_stalled,
        clients_gone,
        slow_readers,
        queue_full,
        redeployed,
        worker_drained,
    )
}
MARS: Mapping[str, tuple[str, ...]] = {
    "worker_killed_before_first_tokens": ("told",),
    "worker_killed_in_mid_stream": ("told",),
    "worker_stalled": ("told",),
    "router_killed": ("cut",),
}
"""What a fault may do to other clients' requests; those that are not here may do nothing to them."""
