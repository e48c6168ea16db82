"""Loads that show what the arena saves and costs: shared prefixes, the host tier, compactions, arena against split."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.gpu_engine import BenchmarkRunner, StepLog, random_prompts
from kernels.hashing import hash_blocks
from memory.api import StepCommands
from memory.device.arena import Arena
from memory.ledger.ledger import ArenaLedger
from memory.ledger.page_table import MUTABLE
from worker.api import GenerateRequest, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

TAIL_TOKENS = 16
"""Of a prompt behind a shared prefix: a short question."""
Signal = asyncio.Event | None
QUIET_STEPS = 40
"""Decode steps ahead of a compaction, to compare with."""


@dataclass
class Bench:
    """A started engine, and what looks into it. What start-up made is left out of later garbage collections."""

    engine: NativeEngine
    runner: BenchmarkRunner
    log: StepLog
    num_requests: int = 0

    @classmethod
    def open(cls, config: WorkerConfig, loaded: BenchmarkRunner | None = None) -> Bench:
        """Starts an engine; ``loaded``: the runner that another one handed over."""
        log, made = StepLog(), []

        def make_runner(config: WorkerConfig) -> BenchmarkRunner:
            made.append(loaded or BenchmarkRunner(config))
            return made[0]

        engine = NativeEngine(config, make_runner, record=log.record)
        # An engine that idles proves its ledger sound, which would hold up another one of the same process.
        engine._ledger.audit = lambda: None  # type: ignore[method-assign]
        if engine.model.device != "cpu":
            gc.collect()
            gc.freeze()
        return cls(engine, made[0], log)

    @property
    def ledger(self) -> ArenaLedger:
        """The engine's book."""
        return self.engine._ledger

    @property
    def arena(self) -> Arena:
        """The device's side of it."""
        return self.runner.arena

    async def read(
        self, prompt: Sequence[int], num_new: int, logprobs: bool = False, wait: int = 0, ready: Signal = None
    ) -> Answer:
        """One greedy answer of ``num_new`` tokens; ``ready`` is set behind its first ``wait`` ones."""
        self.num_requests += 1
        name = f"r{self.num_requests}"
        sampling = SamplingParams(
            max_tokens=num_new, temperature=0.0, ignore_eos=True, logprobs=1 if logprobs else None
        )
        sent_s = time.perf_counter()
        self.engine.submit(GenerateRequest(name, tuple(prompt), sampling))
        first_s, merged = 0.0, None
        async for event in self.engine.stream(name):
            if event.error:
                raise RuntimeError(event.error)
            first_s = first_s or time.perf_counter() - sent_s
            merged = event if merged is None else merged.merged_with(event)
            if ready is not None and merged.num_generated >= wait:
                ready.set()
        assert merged is not None
        return Answer(first_s, merged)

    def ask(self, prompts: Sequence[Sequence[int]], num_new: int, logprobs: bool = False) -> list[Answer]:
        """Greedy answers of ``num_new`` tokens, all prompts at once."""

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*(self.read(prompt, num_new, logprobs) for prompt in prompts))

        return asyncio.run(all_of_them())

    def let_copies_finish(self) -> None:
        """Runs short requests until every page that is due has gone to the host: a few go with every step."""
        while (self.engine.arena_report()["host_tier"] or {}).get("waiting_pages"):
            self.ask(random_prompts(1, 8, self.engine.model.vocab_size, self.num_requests), 8)

    def lose_pages(self) -> None:
        """The arena lets every cached page go, as it would under pressure; the host tier keeps its copies. Only while
        nothing runs: the engine's thread then leaves the ledger alone."""
        if self.engine.snapshot().num_running:
            raise RuntimeError("pages cannot be taken from under running requests")
        self.ledger.shed(dict.fromkeys(self.ledger.grids, self.ledger.headroom().arena_bytes))

    def hand_over(self) -> BenchmarkRunner:
        """Stops the engine and gives its arena back; answers the runner, whose model stays loaded."""
        self.runner.close = self.runner.detach_memory  # type: ignore[method-assign]
        self.engine.close()
        del self.runner.close
        return self.runner

    def close(self) -> None:
        """Gives everything back."""
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first token, and the whole answer as one event."""

    first_s: float
    event: TokenEvent

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were not computed."""
        assert self.event.timeline is not None
        return self.event.timeline.num_cached_tokens


def share_prefix(bench: Bench, prefix_tokens: int, repeats: int) -> dict[str, float]:
    """Time to first token of a prompt, then of another one that begins alike."""
    vocab = bench.engine.model.vocab_size
    first: list[float] = []
    second: list[float] = []
    for seed in range(repeats + 1):  # the first round compiles and is not counted
        prefix, *tails = random_prompts(1, prefix_tokens, vocab, seed) + random_prompts(
            2, TAIL_TOKENS, vocab, 1000 + seed
        )
        for tail, times in zip(tails, (first, second), strict=True):
            [answer] = bench.ask([(*prefix, *tail)], 2)
            times.append(answer.first_s)
        if answer.num_cached < prefix_tokens // 64 * 64:
            raise RuntimeError(f"only {answer.num_cached} of {prefix_tokens} tokens were shared")
    cold, warm = statistics.median(first[1:]), statistics.median(second[1:])
    return {
        "prefix.ttft_first_ms": 1e3 * cold,
        "prefix.ttft_second_ms": 1e3 * warm,
        "prefix.ttft_ratio": cold / warm,
    }


def _hashes(bench: Bench) -> dict[str, set[int]]:
    """Content hashes of all pages in use, by group."""
    found = {}
    for group in bench.ledger.grids:
        _, physical = bench.arena.tables.bound(group)
        found[group] = {int(hash_blocks(bench.arena.grids[group][page])) for page in physical.tolist()}
    return found


def restore_from_host(bench: Bench, num_tokens: int, repeats: int) -> dict[str, float]:
    """Time to first token of a prompt that is computed, and again when the arena has lost its pages and the host tier
    has them. Every page that comes back, of every kind, is compared by hash; so are tokens and log-probabilities."""
    vocab = bench.engine.model.vocab_size
    computed, restored, num_pages, wrong = [], [], 0, 0
    bench.engine.flush_prefix_cache()
    for seed in range(repeats + 1):
        [prompt] = random_prompts(1, num_tokens + TAIL_TOKENS, vocab, 77 + seed)
        [first] = bench.ask([prompt], 24, logprobs=True)
        report = bench.engine.arena_report()["host_tier"]
        bench.let_copies_finish()
        before = _hashes(bench)
        bench.lose_pages()
        brought = bench.engine.arena_report()["host_tier"]["brought_back_bytes"]
        [second] = bench.ask([prompt], 24, logprobs=True)
        if second.num_cached < num_tokens // 64 * 64:
            raise RuntimeError(f"only {second.num_cached} of {num_tokens} tokens came back: {report}")
        came = bench.engine.arena_report()["host_tier"]["brought_back_bytes"] - brought
        computed.append(first.first_s)
        restored.append(second.first_s)
        same = first.event.token_ids == second.event.token_ids
        wrong += not (same and first.event.logprobs == second.event.logprobs)
        after = _hashes(bench)
        kept = {group: len(after[group] & before[group]) for group in after}
        num_pages += sum(kept.values())
        for group, spec in bench.ledger.specs.items():
            per_prompt = 1 if spec.page_tokens == 1 else num_tokens // 64 * 64 // spec.page_tokens
            if spec.window is None and kept[group] < per_prompt:
                wrong += 1
    cold, warm = statistics.median(computed[1:]), statistics.median(restored[1:])
    return {
        "host.compute_ms": 1e3 * cold,
        "host.restore_ms": 1e3 * warm,
        "host.restore_ratio": cold / warm,
        "host.restored_mb": came / 1e6,
        "host.pages_compared": num_pages,
        "host.mismatches": wrong,
    }


def restore_beside_others(bench: Bench, at_once: int, num_tokens: int) -> dict[str, float]:
    """While all rows but one decode, a prompt comes whose ``num_tokens`` lie in the host tier, and before it one that
    is new and as short as what must be computed of the other: seconds of the steps that they join."""
    vocab = bench.engine.model.vocab_size
    bench.engine.flush_prefix_cache()
    [prompt] = random_prompts(1, num_tokens + TAIL_TOKENS, vocab, 31)
    short = random_prompts(1, TAIL_TOKENS, vocab, 32)[0]
    bench.ask([prompt], 8)
    bench.let_copies_finish()
    bench.lose_pages()
    rows = random_prompts(at_once - 1, 64, vocab, 33)

    async def run() -> Answer:
        ready = asyncio.Event()
        first, *others = rows
        tasks = [asyncio.create_task(bench.read(first, 5 * QUIET_STEPS, wait=QUIET_STEPS, ready=ready))]
        tasks += [asyncio.create_task(bench.read(other, 5 * QUIET_STEPS)) for other in others]
        await ready.wait()
        await bench.read(short, QUIET_STEPS)
        answer = await bench.read(prompt, QUIET_STEPS)
        await asyncio.gather(*tasks)
        return answer

    bench.log.steps.clear()
    answer = asyncio.run(run())
    if answer.num_cached < num_tokens // 64 * 64:
        raise RuntimeError(f"only {answer.num_cached} of {num_tokens} tokens came back")
    gaps = [(step, step.at_s - before.at_s) for before, step in pairwise(bench.log.steps)]
    joined = [gap for step, gap in gaps if 0 < step.num_prompt <= TAIL_TOKENS][-2:]
    return {
        "host.beside_decode_step_ms": 1e3
        * statistics.median(gap for step, gap in gaps if not step.num_prompt),
        "host.beside_short_step_ms": 1e3 * joined[0],
        "host.beside_restore_step_ms": 1e3 * joined[1],
    }


def throughput(bench: Bench, size: tuple[int, int, int], rounds: int, name: str) -> dict[str, float]:
    """Output tokens per second, the median of some rounds behind one to warm up, and the median decode step; ``size``:
    requests at once, tokens of prompt and output."""
    at_once, prompt_tokens, num_new = size
    rates: list[float] = []
    steps: list[float] = []
    for seed in range(rounds + 1):
        prompts = random_prompts(at_once, prompt_tokens, bench.engine.model.vocab_size, 500 + seed)
        bench.log.steps.clear()
        started_s = time.perf_counter()
        bench.ask(prompts, num_new)
        rates.append(at_once * num_new / (time.perf_counter() - started_s))
        quiet = bench.log.decode_steps(at_once, 8)
        steps.append(statistics.median(after.at_s - before.at_s for before, after in pairwise(quiet)))
    return {
        f"{name}.tokens_per_s": statistics.median(rates[1:]),
        f"{name}.tokens_per_s_least": min(rates[1:]),
        f"{name}.tokens_per_s_most": max(rates[1:]),
        f"{name}.decode_step_ms": 1e3 * statistics.median(steps[1:]),
    }


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """Bytes to move in all, and in a step at most; ``sealed``: beside the steps, as pages that nobody writes, else
    between them."""

    num_bytes: int
    step_bytes: int
    sealed: bool


class _Compaction:
    """Stands before a ledger's ``commit_step``. After a while of steps in which all rows run, it lets prefixes go and
    plans moves of FULL pages into their holes, up to so many bytes a step, until enough are moved."""

    def __init__(self, bench: Bench, at_once: int, plan: CompactionPlan) -> None:
        self._ledger = bench.ledger
        self._rows = bench.engine._scheduler.rows
        self._commit: Callable[[int], StepCommands] = bench.ledger.commit_step
        self._at_once, self._sealed = at_once, plan.sealed
        self._left, self._step_bytes = plan.num_bytes, plan.step_bytes
        self._steps_left = QUIET_STEPS
        self.began_s = 0.0
        self.moved = self.steps = 0

    def commit(self, step: int) -> StepCommands:
        """See :class:`memory.api.Ledger`."""
        self._steps_left -= self._rows.num_running == self._at_once
        if self._steps_left <= 0 and self._left > 0:
            if not self.began_s:
                self.began_s = time.perf_counter()
            self._plan(step)
        return self._commit(step)

    def _plan(self, step: int) -> None:
        book = self._ledger._book
        group = book.number["full"]
        table = book.tables[group]
        sealed = table.sealed
        if not self._sealed:  # as if every page were still being written
            table.sealed = [MUTABLE] * len(sealed)
        budget = min(self._left, self._step_bytes)
        moved = book.relocator.plan_moves(group, step, book.completed_step, 0, budget)
        table.sealed = sealed
        self._left -= moved
        self.moved += moved
        self.steps += bool(moved)


def compact_under_load(
    bench: Bench, at_once: int, context: int, plan: CompactionPlan, name: str
) -> dict[str, float]:
    """Fills the arena with prefixes, lets some of them go, and moves pages into the holes while ``at_once`` requests
    decode; answers, with ``name`` before each figure, by how much the slowest step behind it exceeded the median."""
    num_bytes = plan.num_bytes
    vocab, ledger = bench.engine.model.vocab_size, bench.ledger
    bench.engine.flush_prefix_cache()
    spec = ledger.specs["full"]
    per_prompt = context // spec.page_tokens * spec.page_bytes
    count = -(-6 * num_bytes // per_prompt)
    fill = random_prompts(count, context, vocab, 9)
    bench.runner.claims = True  # what is in the pages does not matter here
    for first in range(0, count, at_once):
        bench.ask(fill[first : first + at_once], 1)
    # Used prefixes are worth more: the others go first.
    bench.ask([(*prompt, 5) for prompt in fill[::2]], 1)
    bench.runner.claims = False
    # Holes lie between pages that stay, so that more than half of what they are must move to close them.
    ledger.shed({"full": 2 * num_bytes + num_bytes // 4})
    bench.let_copies_finish()
    compaction = _Compaction(bench, at_once, plan)
    ledger.commit_step = compaction.commit  # type: ignore[method-assign]
    bench.log.steps.clear()
    try:
        bench.ask(random_prompts(at_once, 64, vocab, 10), 3 * QUIET_STEPS)
    finally:
        del ledger.commit_step  # type: ignore[method-assign]
    if compaction.moved < 0.9 * num_bytes:
        raise RuntimeError(f"only {compaction.moved} of {num_bytes} bytes were moved")
    steps = bench.log.decode_steps(at_once, 8)
    gaps = [(after.at_s, after.at_s - before.at_s) for before, after in pairwise(steps)]
    usual = statistics.median(gap for _, gap in gaps)
    near = [gap for at_s, gap in gaps if compaction.began_s <= at_s]
    before = [gap for at_s, gap in gaps if at_s < compaction.began_s]
    return {
        f"{name}.step_ms": 1e3 * usual,
        f"{name}.stall_ms": 1e3 * (max(near) - usual),
        f"{name}.undisturbed_stall_ms": 1e3 * (max(before) - usual),
        f"{name}.moved_mb": compaction.moved / 1e6,
        f"{name}.steps": compaction.steps,
    }
