"""Records an engine's steps and gives them to other runners, which may keep their experts elsewhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from memory.api import PlaceRange, StepCommands
from memory.device.residency import BANNED
from memory.device.residency_check import ResidencyCheck
from memory.ledger.spans import merged
from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import EXPERT_GROUP, ModelRunner
from worker.scheduling.recording import RecordedStep
from worker.scheduling.step import StepResult

ARENA_BYTES = 1 << 23


def record_steps(
    config: WorkerConfig, batches: Sequence[int], prompt_tokens: int = 12, new_tokens: int = 6
) -> list[RecordedStep]:
    """Runs waves of so many requests at once, half of them sampled with noise; answers every step. A wave is submitted
    before its first step is planned."""
    steps: list[RecordedStep] = []
    engine = NativeEngine(
        config, audit=True, record=lambda plan, result: steps.append(RecordedStep(plan, result))
    )

    def submit(number: int) -> None:
        prompt = tuple((number * 31 + i * 7) % 230 + 20 for i in range(prompt_tokens + number % 5))
        temperature = 0.0 if number % 2 else 0.9
        sampling = SamplingParams(
            max_tokens=new_tokens, temperature=temperature, seed=number, logprobs=5, ignore_eos=True
        )
        engine.submit(GenerateRequest(str(number), prompt, sampling))

    async def follow(number: int) -> None:
        async for _ in engine.stream(str(number)):
            pass

    async def waves() -> None:
        first = 0
        for size in batches:
            with engine._changed:
                for number in range(first, first + size):
                    submit(number)
            await asyncio.gather(*(follow(n) for n in range(first, first + size)))
            first += size

    try:
        asyncio.run(waves())
    finally:
        engine.close()
    return steps


def replay_steps(runner: ModelRunner, steps: Sequence[RecordedStep], arena_bytes: int) -> list[StepResult]:
    """A runner's results for recorded plans; its memory is fresh and of the size that was recorded."""
    runner.attach_memory(runner.page_specs, arena_bytes)
    return [runner.run(step.plan) for step in steps]


def force_places(
    steps: Sequence[RecordedStep], floor: int, most: int, seed: int, share: float = 0.4
) -> list[RecordedStep]:
    """The steps with places taken from the experts and given back at random, beyond what the recording ledger did:
    bans of any size, allows of some of what was taken, in any step; ``floor`` to ``most`` places are usable.

    What the ledger itself bans or allows keeps its meaning; places are only ever withheld from the experts here.
    """
    dice = random.Random(seed)
    allowed: set[int] = set()
    taken: set[int] = set()
    forced = []
    for step in steps:
        commands = step.plan.commands
        banned = {place for entry in commands.ban for place in range(entry.first, entry.last)}
        fresh = {place for entry in commands.allow for place in range(entry.first, entry.last)}
        before = allowed - taken
        allowed = (allowed - banned) | fresh
        taken &= allowed
        usable = sorted(allowed - taken)
        if usable and dice.random() < share:
            first = dice.randrange(len(usable))
            count = min(dice.randrange(1, len(usable) + 1), max(0, len(usable) - floor))
            taken |= set(usable[first : first + count])
        elif taken and dice.random() < share:
            taken -= set(dice.sample(sorted(taken), dice.randrange(1, len(taken) + 1)))
        usable = sorted(allowed - taken)
        taken |= set(dice.sample(usable, max(0, len(usable) - most)))
        if len(usable) < floor:  # the ledger itself took some
            taken -= set(dice.sample(sorted(taken), min(len(taken), floor - len(usable))))
        now = allowed - taken
        commands = replace(commands, ban=_ranges(before - now), allow=_ranges(now - before))
        forced.append(RecordedStep(replace(step.plan, commands=commands), step.result))
    return forced


def _ranges(places: set[int]) -> tuple[PlaceRange, ...]:
    spans = merged((place, place + 1) for place in places)
    return tuple(PlaceRange(low, high) for low, high in spans)


def replay_poisoned(
    runner: ModelRunner, steps: Sequence[RecordedStep], arena_bytes: int
) -> tuple[list[StepResult], list[int]]:
    """Like :func:`replay_steps`; where a step's moves and copies are carried out, the bytes of the places that it bans
    are overwritten as a band would, and behind it the tables are audited and every place is compared with its hash.
    Answers the results, and the places usable at each step."""
    runner.attach_memory(runner.page_specs, arena_bytes)
    pager = runner.pager
    assert pager is not None
    places, apply = runner.arena.grids[EXPERT_GROUP], runner.arena.apply

    def take_bytes(commands: StepCommands) -> None:
        for entry in commands.ban:
            places[entry.first : entry.last] = 0xEE
        apply(commands)

    runner.arena.apply = take_bytes  # type: ignore[method-assign]
    hashes = pager.host.hashes.to(places.device)
    check = ResidencyCheck(pager.residency, places, hashes, pager.host.block_bytes)
    results, counts = [], []
    for step in steps:
        results.append(runner.run(step.plan))
        counts.append(int((pager.residency.owner != BANNED).sum()))
        problems = pager.residency.audit()
        assert problems == [], problems
        check.check(torch.arange(len(places), device=places.device))
        assert int(check.found[0]) == 0, "a place does not hold its owner's bytes"
    return results, counts


def same_results(left: Sequence[StepResult], right: Sequence[StepResult]) -> bool:
    """Whether tokens and log-probabilities are equal bit for bit."""
    return all(
        (a.token_ids == b.token_ids).all() and a.logprobs == b.logprobs
        for a, b in zip(left, right, strict=True)
    )


def with_places(config: WorkerConfig, place_bytes: int, num_places: int) -> WorkerConfig:
    """``config`` with experts paged into a fixed number of places."""
    return replace(config, experts="paged", expert_bytes=place_bytes * num_places)
