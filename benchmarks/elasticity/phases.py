"""Phases of load on one engine: chats of several turns and long prompts, each client its next when the last ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    """Clients for ``seconds``; then no request begins, and the phase ends with its last one.

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


@dataclass
class PhaseLog:
    """What a phase brought. ``prompt_tokens`` count when the first token came; gaps lie between a stream's tokens."""

    name: str
    began_s: float
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_requests: int = 0
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return (self.prompt_tokens + self.output_tokens) / (self.ended_s - self.began_s)


class Driver:
    """Drives one engine through phases, and looks at its expert places meanwhile.

    Attributes:
        places: (seconds, usable expert places), every :data:`SAMPLE_S`.
    """

    def __init__(self, engine: Engine, prompt: Prompt, clock: Clock, seed: int = 0) -> None:
        self.clock = clock
        self.places: list[tuple[float, float]] = []
        self._engine = engine
        self._prompt = prompt
        self._seed = seed
        self._num_requests = 0

    async def run(self, phases: Sequence[Phase]) -> list[PhaseLog]:
        """All phases, one behind the other."""
        watcher = asyncio.create_task(self._watch())
        try:
            return [await self._phase(number, phase) for number, phase in enumerate(phases)]
        finally:
            watcher.cancel()

    async def _watch(self) -> None:
        while True:
            extra = self._engine.snapshot().extra
            now = self.clock()
            if not self.places or now >= self.places[-1][0] + SAMPLE_S:
                self.places.append((now, extra.get("expert_places", 0.0)))
            await asyncio.sleep(STALLED_S)

    async def _phase(self, number: int, phase: Phase) -> PhaseLog:
        log = PhaseLog(phase.name, self.clock())
        dice = [
            random.Random(f"{self._seed} {number} {client}") for client in range(phase.chats + phase.longs)
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
                if self.clock() >= log.began_s + phase.seconds:
                    return
                history += self._prompt(dice, dice.randint(*phase.chat_tokens))
                history += await self.ask(history, dice.randint(*phase.answer_tokens), log)

    async def _long(self, dice: random.Random, phase: Phase, log: PhaseLog) -> None:
        while self.clock() < log.began_s + phase.seconds:
            prompt = self._prompt(dice, dice.randint(*phase.long_tokens))
            await self.ask(prompt, dice.randint(*phase.long_answer), log)

    async def ask(
        self, prompt: tuple[int, ...], num_tokens: int, log: PhaseLog, name: str = ""
    ) -> tuple[int, ...]:
        """One request to its end; answers its tokens. ``name``: its id, a number where none is given."""
        name = name or str(self._num_requests)
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        began = last = self.clock()
        self._engine.submit(GenerateRequest(name, prompt, sampling))
        answer: list[int] = []
        async for event in self._engine.stream(name):
            if event.error:
                raise RuntimeError(event.error)
            now = self.clock()
            if not answer and event.token_ids:
                log.first_token_s.append(now - began)
                log.prompt_tokens += len(prompt)
            elif event.token_ids:
                # Tokens that came at once share the gap: a reader that was late does not hide it.
                log.gaps_s += [(now - last) / len(event.token_ids)] * len(event.token_ids)
            last = now
            answer += event.token_ids
        log.output_tokens += len(answer)
        log.num_requests += 1
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
