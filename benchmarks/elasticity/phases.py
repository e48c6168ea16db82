"""Phases of load on one engine: chats of several turns and long prompts, each client its next when the last ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from worker.api import Engine, GenerateRequest, SamplingParams

TURNS = 4
"""A conversation's; then its client begins another."""
SAMPLE_S = 0.02
STALLED_S = 0.01
"""A clock of computed seconds stands still while everybody waits; looks at it are so far apart in real ones."""

Prompt = Callable[[random.Random, int], tuple[int, ...]]
"""Tokens of a length, out of some text."""
Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Clients for ``seconds``; what is under way then is aborted, and the phase ends when all have left. What counts is
    what was done in the ``seconds``.

    Attributes:
        chats: clients that talk: a turn adds ``chat_tokens`` to the conversation and gets ``answer_tokens``.
        longs: clients that send prompts of ``long_tokens`` and get ``long_answer`` tokens.
    """

    name: str
    seconds: float
    chats: int = 0
    longs: int = 0
    chat_tokens: tuple[int, int] = (24, 64)
    answer_tokens: tuple[int, int] = (24, 72)
    long_tokens: tuple[int, int] = (1200, 2400)
    long_answer: tuple[int, int] = (8, 24)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, answer included."""
        chat = TURNS * (self.chat_tokens[1] + self.answer_tokens[1]) if self.chats else 0
        return max(chat, self.long_tokens[1] + self.long_answer[1] if self.longs else 0)


@dataclass(slots=True)
class Asked:
    """A request of a phase: the engine's number of it, and when its first token came (never: infinite)."""

    number: int
    prompt_tokens: int
    first_s: float = inf


class Progress:
    """How far the prompts of requests were computed, by the engine's steps."""

    def __init__(self) -> None:
        self._points: dict[int, list[tuple[float, int]]] = {}

    def note(self, number: int, began_s: float, ended_s: float, computed: int, length: int) -> None:
        """A step took a request from ``computed`` tokens ``length`` further."""
        points = self._points.setdefault(number, [])
        points += [(began_s, computed), (ended_s, computed + length)]

    def tokens(self, number: int, at_s: float) -> float:
        """Tokens of a request that were computed, or found in the cache, by ``at_s``; steps go on evenly."""
        points = self._points.get(number, [])
        if not points or at_s < points[0][0]:
            return 0.0
        for (left_s, left), (right_s, right) in pairwise(points):
            if at_s < right_s:
                return left + (right - left) * max(0.0, at_s - left_s) / (right_s - left_s)
        return points[-1][1]


@dataclass
class PhaseLog:
    """What a phase brought. ``output_tokens`` are those that came in its ``seconds``; gaps lie between a stream's
    tokens."""

    name: str
    began_s: float
    seconds: float = 0.0
    ended_s: float = 0.0
    output_tokens: int = 0
    asked: list[Asked] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def deadline_s(self) -> float:
        """What comes later does not count."""
        return self.began_s + self.seconds

    def tokens_per_s(self, progress: Progress) -> float:
        """Goodput: output tokens and tokens of prompts a second. A prompt that had no token in time counts as far as it
        was computed, so that a phase need not be long against its prompts."""
        tokens = float(self.output_tokens)
        for request in self.asked:
            if request.first_s <= self.deadline_s:
                tokens += request.prompt_tokens
            else:
                tokens += min(request.prompt_tokens, progress.tokens(request.number, self.deadline_s))
        return tokens / self.seconds


class Driver:
    """Drives one engine through phases, and looks at its expert places meanwhile.

    Attributes:
        places: (seconds, usable expert places), every :data:`SAMPLE_S`.
        logs: of the phases so far.
        num_requests: that this engine has had.
    """

    def __init__(
        self, engine: Engine, prompt: Prompt, clock: Clock, num_requests: int = 0, seed: int = 0
    ) -> None:
        self.clock = clock
        self.logs: list[PhaseLog] = []
        self.num_requests = num_requests
        self.places: list[tuple[float, float]] = []
        self._engine = engine
        self._prompt = prompt
        self._seed = seed
        self._open: dict[str, PhaseLog] = {}

    async def run(self, phases: Sequence[Phase]) -> None:
        """All phases, one behind the other."""
        watcher = asyncio.create_task(self._watch())
        try:
            for phase in phases:
                self.logs.append(await self._phase(phase))
        finally:
            watcher.cancel()

    async def _watch(self) -> None:
        while True:
            extra = self._engine.snapshot().extra
            now = self.clock()
            if not self.places or now >= self.places[-1][0] + SAMPLE_S:
                self.places.append((now, extra.get("expert_places", 0.0)))
            for name, log in list(self._open.items()):
                if now >= log.deadline_s:
                    self._engine.abort(name)
            await asyncio.sleep(STALLED_S)

    async def _phase(self, phase: Phase) -> PhaseLog:
        log = PhaseLog(phase.name, self.clock(), phase.seconds)
        dice = [
            random.Random(f"{self._seed} {phase.name} {client}")
            for client in range(phase.chats + phase.longs)
        ]
        chats = [self._chat(rng, phase, log) for rng in dice[: phase.chats]]
        longs = [self._long(rng, phase, log) for rng in dice[phase.chats :]]
        await asyncio.gather(*chats, *longs)
        log.ended_s = self.clock()
        return log

    async def _chat(self, dice: random.Random, phase: Phase, log: PhaseLog) -> None:
        while True:
            history: tuple[int, ...] = ()
            for _ in range(TURNS):
                if self.clock() >= log.deadline_s:
                    return
                history += self._prompt(dice, dice.randint(*phase.chat_tokens))
                history += await self.ask(history, dice.randint(*phase.answer_tokens), log)

    async def _long(self, dice: random.Random, phase: Phase, log: PhaseLog) -> None:
        while self.clock() < log.deadline_s:
            prompt = self._prompt(dice, dice.randint(*phase.long_tokens))
            await self.ask(prompt, dice.randint(*phase.long_answer), log)

    async def ask(
        self, prompt: tuple[int, ...], num_tokens: int, log: PhaseLog, name: str = ""
    ) -> tuple[int, ...]:
        """One request to its end; answers its tokens. ``name``: its id, a number where none is given."""
        name = name or str(self.num_requests)
        request = Asked(self.num_requests, len(prompt))
        log.asked.append(request)
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        began = last = self.clock()
        self._engine.submit(GenerateRequest(name, prompt, sampling))
        self._open[name] = log
        answer: list[int] = []
        async for event in self._engine.stream(name):
            if event.error:
                raise RuntimeError(event.error)
            now = self.clock()
            if not answer and event.token_ids:
                log.first_token_s.append(now - began)
                request.first_s = now
            elif event.token_ids:
                # Tokens that came at once share the gap: a reader that was late does not hide it.
                log.gaps_s += [(now - last) / len(event.token_ids)] * len(event.token_ids)
            last = now
            answer += event.token_ids
            if now <= log.deadline_s:
                log.output_tokens += len(event.token_ids)
        del self._open[name]
        return tuple(answer)


def recovered_s(places: Sequence[tuple[float, float]], burst: PhaseLog, share: float = 0.95) -> float:
    """Seconds from a burst's end until the expert places are back at ``share`` of their mean in the phase before, for
    good as far as ``burst`` was followed by calm; the time seen if they never were."""
    before = [count for at, count in places if at < burst.began_s]
    wanted = share * sum(before[len(before) // 2 :]) / max(1, len(before) - len(before) // 2)
    after = [(at, count) for at, count in places if at >= burst.ended_s]
    for at, count in after:
        if count >= wanted:
            return at - burst.ended_s
    return after[-1][0] - burst.ended_s if after else 0.0
