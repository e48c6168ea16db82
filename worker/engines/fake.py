"""An engine without a model: scripted tokens at scripted times, for tests and demonstrations of all that is above.

One thread serves every stream. It keeps a batch limit, a waiting queue and a simulated arena, retracts requests
when that arena is full, and can die or stall on purpose. The script comes from ``fake.json`` in the model folder.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

from memory.api import Headroom, KindHeadroom
from worker.api import (
    FinishReason,
    GenerateRequest,
    ModelInfo,
    RequestTimeline,
    TokenEvent,
    WorkerSnapshot,
)
from worker.config import WorkerConfig
from worker.engines.checks import check_token_ids
from worker.engines.desk import RequestDesk
from worker.engines.fake_caches import FakeExperts, FakePrefixes
from worker.engines.fake_script import FakeScript, TokenSource, read_script
from worker.engines.streams import EventReader
from worker.errors import InvalidRequest, PromptTooLong
from worker.model_folder import read_model_info

LONGEST_SLEEP_S = 0.25
"""A loop that waits for a late token turns at least so often, so that waiting is no stall."""


class _Live:
    """One request in the engine."""

    __slots__ = ("cells", "due_s", "generated", "num_retractions", "queued_s", "request", "source", "stamps")

    def __init__(self, request: GenerateRequest, source: TokenSource) -> None:
        self.request = request
        self.source = source
        self.generated = 0
        self.cells = 0
        """experts that its tokens used, all of them"""
        self.due_s = 0.0
        self.num_retractions = 0
        self.queued_s = time.monotonic()
        self.stamps = RequestTimeline(queued_s=time.time(), num_prompt_tokens=len(request.prompt_token_ids))

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt_token_ids) + self.generated


class FakeEngine:
    """The scripted engine. ``script`` overrides the folder's ``fake.json``."""

    def __init__(self, config: WorkerConfig, script: FakeScript | None = None) -> None:
        folder = Path(config.model or "fake")
        self._config = config
        self._script = script if script is not None else read_script(folder)
        self._model = _model_info(config, folder, self._script)
        self._arena_bytes = self._script.arena_bytes or config.arena_bytes
        self._prefixes = FakePrefixes(self._script)
        self._experts = FakeExperts(self._script, self._model)
        self._desk: RequestDesk[_Live] = RequestDesk(config)
        self._counters = self._desk.counters
        self._running: dict[str, _Live] = {}
        self._running_tokens = 0
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
        self._thread.start()

    @property
    def model(self) -> ModelInfo:
        """The scripted model's facts."""
        return self._model

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request; see :meth:`worker.api.Engine.submit`."""
        self._validate(request)
        self._desk.submit(request, lambda taken: _Live(taken, TokenSource(self._script, taken, self._model)))

    def _validate(self, request: GenerateRequest) -> None:
        if request.grammar is not None:
            raise InvalidRequest("response_format", "engine=fake cannot enforce a grammar.")
        needed = len(request.prompt_token_ids) + request.sampling.max_tokens
        if needed > self._model.max_model_len:
            raise PromptTooLong(needed, self._model.max_model_len)
        if self._script.bytes_per_token and needed * self._script.bytes_per_token > self._arena_bytes:
            raise PromptTooLong(needed, self._arena_bytes // self._script.bytes_per_token, "the arena")
        check_token_ids(request, self._model.vocab_size)

    def stream(self, request_id: str) -> EventReader:
        """The request's events; see :meth:`worker.api.Engine.stream`."""
        return self._desk.stream(request_id, self.abort)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; unknown ids are ignored."""
        with self._desk.changed:
            live = self._desk.requests.get(request_id)
            if live is not None:
                self._finish(live, FinishReason.ABORT)
                self._desk.changed.notify()

    def snapshot(self) -> WorkerSnapshot:
        """Counters, queue and simulated headroom now."""
        with self._desk.changed:
            queue = self._desk.queue(len(self._running), self._config.max_running)
            return replace(
                self._counters.snapshot(queue, self._headroom()),
                expert_hits=self._experts.hits,
                expert_misses=self._experts.misses,
                expert_bytes_paged=self._experts.misses * self._script.expert_bytes,
                experts=self._experts.residency(),
            )

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests, waits, and aborts what is left after ``timeout_s``."""
        return await self._desk.drain(timeout_s, self.abort)

    def check_health(self) -> None:
        """Raises EngineDead after a death, or when requests stand still for longer than ``stall_timeout_s``."""
        self._desk.check_health()

    def close(self) -> None:
        """Stops the thread; open streams end with ABORT."""
        with self._desk.changed:
            self._desk.closed = True
            for live in list(self._desk.requests.values()):
                self._finish(live, FinishReason.ABORT)
            self._desk.changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        try:
            with self._desk.changed:
                while not self._desk.closed:
                    wait_s = self._step()
                    if wait_s == 0.0:  # lets submit and abort in between two steps
                        self._desk.changed.wait(1e-4)
                    else:
                        self._desk.changed.wait(wait_s)
        except Exception as error:
            self._die(f"{type(error).__name__}: {error}")

    def _die(self, error: str) -> None:
        with self._desk.changed:
            self._running.clear()
            self._running_tokens = 0
            self._desk.die(error)

    def _step(self) -> float | None:
        """Emits what is due; answers the seconds until the next token is due, None when there is nothing to do."""
        stall_after = self._script.stall_after_tokens
        if stall_after and self._counters.generated_tokens >= stall_after:
            return None
        now = time.monotonic()
        self._desk.advanced()
        self._admit(now)
        due = [live for live in self._running.values() if live.due_s <= now]
        events: list[TokenEvent] = []
        try:
            for live in due:
                self._emit_due(live, now, events)
        finally:  # what was said before a scripted death is heard
            self._desk.streams.put_all(events)
        if events:
            self._counters.stepped(time.monotonic() - now)
            self._admit(now)
        if not self._running:
            return None
        next_s = min(live.due_s for live in self._running.values()) - time.monotonic()
        return min(max(next_s, self._script.tick_s if self._script.tokens_per_s else 0.0), LONGEST_SLEEP_S)

    def _emit_due(self, live: _Live, now: float, events: list[TokenEvent]) -> None:
        """All that is due by now, several tokens after a late step; one a step where no pace is scripted."""
        while live.due_s <= now and self._is_running(live) and self._make_room_for(live):
            events.append(self._emit(live))
            if not self._script.tokens_per_s:
                return

    def _admit(self, now: float) -> None:
        while self._desk.waiting and len(self._running) < self._config.max_running:
            live = self._desk.waiting[0]
            if not self._fits(live.num_tokens + 1):
                return
            self._desk.waiting.popleft()
            self._running[live.request.request_id] = live
            self._running_tokens += live.num_tokens
            prompt, salt = live.request.prompt_token_ids, live.request.cache_salt
            cached = self._prefixes.match(prompt, salt)
            self._prefixes.insert(prompt, salt)
            live.due_s = now + self._script.first_token_delay_s(live.num_tokens - cached)
            if not live.stamps.scheduled_s:
                live.stamps = replace(live.stamps, scheduled_s=time.time(), num_cached_tokens=cached)
                self._counters.scheduled(now - live.queued_s)
                self._counters.cached_tokens += cached

    def _used_bytes(self) -> int:
        return self._script.bytes_per_token * self._running_tokens

    def _fits(self, more_tokens: int) -> bool:
        bytes_per_token = self._script.bytes_per_token
        return not bytes_per_token or self._used_bytes() + more_tokens * bytes_per_token <= self._arena_bytes

    def _make_room_for(self, live: _Live) -> bool:
        """Retracts the latest admitted requests until one more token of ``live`` fits; False if it was one of them."""
        while not self._fits(1):
            victim = next(reversed(self._running.values()))
            self._stop_running(victim)
            victim.num_retractions += 1
            victim.stamps = replace(victim.stamps, retracted_s=(*victim.stamps.retracted_s, time.time()))
            self._desk.waiting.appendleft(victim)
            self._counters.retracted()
            if victim is live:
                return False
        return True

    def _emit(self, live: _Live) -> TokenEvent:
        if self._script.die_after_tokens and self._counters.generated_tokens >= self._script.die_after_tokens:
            raise RuntimeError(f"scripted death after {self._script.die_after_tokens} tokens")
        token = live.source.next_token(live.generated)
        live.generated += 1
        self._running_tokens += 1
        self._counters.generated_tokens += 1
        if not live.stamps.first_token_s:
            live.stamps = replace(live.stamps, first_token_s=time.time())
        live.due_s += self._script.miss_s * self._experts.use(token)
        live.cells |= self._experts.cells(token)
        if self._script.tokens_per_s:
            # From the time it was due and not from now: a late step does not slow the stream down.
            live.due_s += 1.0 / self._script.tokens_per_s
        reason = live.source.finish_reason(token, live.generated)
        event = TokenEvent(
            request_id=live.request.request_id,
            token_ids=(token,),
            num_generated=live.generated,
            logprobs=live.source.logprobs(token),
            finish_reason=reason,
            stop_token_id=token if reason is FinishReason.STOP else None,
        )
        if reason is None:
            return event if live.generated > 1 else replace(event, timeline=self._timeline(live))
        self._forget(live)
        self._counters.num_finished += 1
        return replace(
            event,
            timeline=self._timeline(live, time.time()),
            used_expert_bits=self._experts.as_bytes(live.cells),
        )

    def _finish(self, live: _Live, reason: FinishReason) -> None:
        self._forget(live)
        self._counters.num_aborted += 1
        self._desk.streams.put(
            TokenEvent(
                live.request.request_id,
                num_generated=live.generated,
                finish_reason=reason,
                timeline=self._timeline(live, time.time()),
            )
        )

    def _forget(self, live: _Live) -> None:
        del self._desk.requests[live.request.request_id]
        if not self._stop_running(live):
            self._desk.waiting.remove(live)

    def _is_running(self, live: _Live) -> bool:
        return live.request.request_id in self._running

    def _stop_running(self, live: _Live) -> bool:
        if self._running.pop(live.request.request_id, None) is None:
            return False
        self._running_tokens -= live.num_tokens
        return True

    def _timeline(self, live: _Live, finished_s: float = 0.0) -> RequestTimeline:
        return replace(
            live.stamps,
            finished_s=finished_s,
            num_generated_tokens=live.generated,
            num_retractions=live.num_retractions,
        )

    def _headroom(self) -> Headroom:
        used = self._used_bytes()
        return Headroom(
            arena_bytes=self._arena_bytes,
            gap_bytes=self._arena_bytes - used,
            kinds={"full": KindHeadroom(used_bytes=used)},
        )


def _model_info(config: WorkerConfig, folder: Path, script: FakeScript) -> ModelInfo:
    found = read_model_info(folder, config)
    return replace(
        found,
        architecture="Fake",
        vocab_size=script.vocab_size or found.vocab_size or 256,
        max_model_len=found.max_model_len or script.max_model_len,
        eos_token_ids=script.eos_token_ids or found.eos_token_ids,
        num_layers=script.num_layers or found.num_layers,
        num_experts=script.num_experts or found.num_experts,
        experts_per_token=script.experts_per_token or found.experts_per_token,
    )
