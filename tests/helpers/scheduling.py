"""A scheduler at work without a model: specs, ledger, fake runner and loop in one piece, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memory.api import Ledger, PageSpec
from tests.helpers.fake_pass import PassRunner
from tests.helpers.fake_runner import (
    END_TOKEN_ID,
    FakeRunner,
    expected_tokens,
    expert_spec,
    full_spec,
    state_spec,
    window_spec,
)
from tests.helpers.free_lists import FreeListLedger
from worker.api import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.loop import EngineLoop
from worker.scheduling.admission import OutputForecast
from worker.scheduling.grammars import Grammars
from worker.scheduling.ledgers import make_ledger
from worker.scheduling.limits import Limits, PassPrice, RingRule
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import StepPlan

FULL = (full_spec(),)
HYBRID = (full_spec(), state_spec())
WINDOWED = (full_spec(), window_spec(40))
ALL_KINDS = (full_spec(64), window_spec(40), state_spec())
WITH_EXPERTS = (full_spec(), state_spec(), expert_spec())
RECURRENT = (state_spec(),)
LEDGERS = ("free lists", "arena", "split")


@dataclass
class Desk:
    """Submits requests, turns the loop, keeps the events, and knows the right answers."""

    specs: Sequence[PageSpec]
    scheduler: Scheduler
    ledger: Ledger
    runner: FakeRunner
    loop: EngineLoop
    requests: dict[str, GenerateRequest] = field(default_factory=dict)
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)

    def ask(self, request_id: str, prompt: Sequence[int], salt: str = "", **sampling: Any) -> GenerateRequest:
        """Checks and queues a request; its seed is its number unless one is given."""
        params = SamplingParams(**{"seed": len(self.requests), **sampling})
        request = GenerateRequest(request_id, tuple(prompt), params, cache_salt=salt)
        self.scheduler.check(request)
        self.scheduler.submit(request)
        self.requests[request_id] = request
        self.events[request_id] = []
        return request

    def step(self, turns: int = 1) -> list[StepPlan]:
        """Turns the loop; the plans that ran."""
        first = len(self.runner.plans)
        for _ in range(turns):
            self.take(self.loop.step())
        return [plan for plan in self.runner.plans[first:] if plan.num_rows]

    def take(self, events: Sequence[TokenEvent]) -> None:
        """Keeps events by request."""
        for event in events:
            self.events[event.request_id].append(event)

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        self.take(self.scheduler.abort(request_id))

    def finish(self, most_turns: int = 20_000) -> int:
        """Turns until nobody has work; how many turns that took."""
        turns = 0
        while self.loop.has_work:
            self.step()
            turns += 1
            assert turns < most_turns, "it never ends"
        self.loop.settle()
        return turns

    def tokens(self, request_id: str) -> list[int]:
        """What a request has got so far."""
        return [token for event in self.events[request_id] for token in event.token_ids]

    def last(self, request_id: str) -> TokenEvent:
        """A request's last event so far."""
        return self.events[request_id][-1]

    def expected(self, request_id: str) -> list[int]:
        """The right answer."""
        request = self.requests[request_id]
        assert request.sampling.seed is not None
        return expected_tokens(
            self.specs, request.prompt_token_ids, request.sampling, request.sampling.seed, self.end_ids
        )

    end_ids: tuple[int, ...] = (END_TOKEN_ID,)

    def check_answers(self) -> None:
        """Every request's tokens are right, up to where it was aborted."""
        for request_id in self.requests:
            got, right = self.tokens(request_id), self.expected(request_id)
            reasons = [event.finish_reason for event in self.events[request_id]]
            assert all(reason is None for reason in reasons[:-1]), "an event came after the last one"
            if reasons[-1] is FinishReason.ABORT:
                assert got == right[: len(got)], request_id
            else:
                assert got == right, request_id
                assert reasons[-1] in (FinishReason.STOP, FinishReason.LENGTH)

    def check_empty(self) -> None:
        """Nothing is left behind: all bytes are free or can be evicted."""
        self.ledger.audit()
        headroom = self.ledger.headroom()
        assert all(kind.used_bytes == kind.pending_bytes == 0 for kind in headroom.kinds.values()), headroom
        assert (self.scheduler.rows.num_running, len(self.scheduler.waiting)) == (0, 0)
        assert self.scheduler.waiting.num_tokens == 0


def optimist() -> OutputForecast:
    """Expects next to no output, whatever happens: admits until somebody must be sent back."""
    return OutputForecast(0.0, memory=1 << 40, penalty=0.0, least=0.0)


def bytes_for(specs: Sequence[PageSpec], ledger: str, num_tokens: int, max_running: int = 8) -> int:
    """The smallest arena, to a twentieth, in which a request of ``num_tokens`` tokens can end."""
    arena_bytes = 1024
    while True:
        desk = make_desk(specs, ledger, arena_bytes, max_running)
        if desk.ledger.can_ever_grant(num_tokens) is None:
            return arena_bytes
        arena_bytes += max(128, arena_bytes // 20)


def make_desk(
    specs: Sequence[PageSpec] = FULL,
    ledger: str = "arena",
    arena_bytes: int = 1 << 18,
    max_running: int = 8,
    max_step_tokens: int = 64,
    overlap: bool = False,
    prefix_cache: bool = True,
    deterministic: bool = False,
    forecast: OutputForecast | None = None,
    grammars: Grammars | None = None,
    host_tier_bytes: int = 0,
    pass_tokens: int = 0,
    ring: RingRule | None = None,
    price: PassPrice | None = None,
    chunk_tokens: int = 960,
    max_model_len: int = 4096,
) -> Desk:
    """``ledger`` is one of LEDGERS; the free lists know no prefix cache."""
    arena_bytes -= arena_bytes % 128
    prefix_cache = prefix_cache and ledger != "free lists"
    config = WorkerConfig(
        model="fake",
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        memory_mode="split" if ledger == "split" else "arena",
        prefix_cache=prefix_cache,
        host_tier_bytes=host_tier_bytes,
    )
    book: Ledger
    if ledger == "free lists":
        book = FreeListLedger(specs, arena_bytes, max_running, max_step_tokens)
    else:
        book = make_ledger(config, specs, arena_bytes, chunk_tokens=pass_tokens)
    runner = PassRunner(specs) if pass_tokens else FakeRunner(specs)
    runner.keep_plans = True
    runner.attach_memory(specs, arena_bytes)
    limits = Limits(
        max_running,
        max_step_tokens,
        max_model_len=max_model_len,
        end_token_ids=(END_TOKEN_ID,),
        deterministic=deterministic,
        prefix_cache=prefix_cache,
        checkpoint_tokens=128,
        pass_tokens=pass_tokens,
        ring=ring,
        price=price,
        chunk_tokens=chunk_tokens,
    )
    scheduler = Scheduler(book, limits, forecast, grammars)
    loop = EngineLoop(scheduler, book, runner, overlap=overlap, audit=True)
    return Desk(specs, scheduler, book, runner, loop)
