"""One simulated worker: an arena that requests, prefix pages and experts share, and a model of how long steps take.

Decode steps between two events are taken together; whatever happens to the worker meanwhile cuts them at the next
whole step. A prefill chunk is one step, shared with the rows that decode.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random

from benchmarks.placement.experts import Domain, ExpertCache, ExpertModel
from benchmarks.placement.traces import MOONCAKE_BLOCK_TOKENS, SimRequest
from memory.api import Headroom, KindHeadroom
from worker.api import ExpertResidency, WorkerSnapshot

MAX_STEPS_AT_ONCE = 32
SAMPLED_STEPS = 3
RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker's size and speed: a hybrid 30B-A3B model in 8-bit blocks on a card whose memory holds part of it.

    Attributes:
        step_s, row_s: a decode step's fixed time, and per row.
        hbm_bytes_per_s: at which a step reads the rows' KV.
        token_s, token_context_s: prefill per token, and per token and token of context before it.
        floor_places: experts that stay whatever the KV asks for.
        decode_share: of the time while prompts are computed, for decode steps in between.
        prefix_share: most of the arena that evictable prefix pages keep from the experts.
    """

    arena_bytes: float = 24e9
    kv_bytes_per_token: float = 24_576.0
    expert_bytes: float = 4.72e6
    link_bytes_per_s: float = 50e9
    step_s: float = 6e-3
    row_s: float = 5e-5
    hbm_bytes_per_s: float = 3e12
    token_s: float = 8e-5
    token_context_s: float = 1e-9
    chunk_tokens: int = 4_096
    decode_share: float = 0.3
    max_running: int = 48
    floor_places: int = 920
    prefix_share: float = 0.25

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit beside the experts' floor."""
        return int((self.arena_bytes - self.floor_places * self.expert_bytes) / self.kv_bytes_per_token)


@dataclass(slots=True)
class Row:
    """A request on a worker."""

    request: SimRequest
    ticket: int
    arrived_s: float
    prefill_left: int = 0
    hit_tokens: int = 0
    private_tokens: int = 0
    generated: int = 0
    first_token_s: float = -1.0
    num_retractions: int = 0
    pinned: tuple[int, ...] = ()

    @property
    def context(self) -> int:
        """Tokens with computed KV once prefill is done."""
        return self.request.prompt_tokens + self.generated


@dataclass(slots=True)
class StepOutcome:
    """What a wake-up brought: rows that got their first token, rows that finished."""

    first: list[Row] = field(default_factory=list)
    finished: list[Row] = field(default_factory=list)


class SimWorker:
    """A worker; the simulation drives it by ``submit``, ``wake`` and ``next_wake_s``."""

    def __init__(
        self, name: str, spec: WorkerSpec, model: ExpertModel, domains: Sequence[Domain], rng: Random
    ) -> None:
        self.name = name
        self.spec = spec
        self._model = model
        self._domains = domains
        self._rng = rng
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.cache = ExpertCache(rng, model.num_cells)
        self._blocks: OrderedDict[int, int] = OrderedDict()  # block -> rows that read it
        self._num_pinned = 0
        self._private_tokens = 0
        self.next_wake_s: float | None = None
        self._step_began_s = 0.0
        self._one_step_s = 0.0
        self._num_steps = 0
        self._chunk: list[tuple[Row, int]] = []
        self._decoding: list[Row] = []
        self._sequence = 0
        self._generation = 0
        self.submitted = self.finished = self.retractions = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.num_missed = self.num_steps = 0
        self._missed_per_step = 0.0
        self._recent_retractions: deque[float] = deque()

    # -- driven by the simulation -------------------------------------------------------------------------------

    def submit(self, row: Row, now_s: float) -> None:
        """Queues a request, and wakes the worker at the next whole step."""
        self.submitted += 1
        self.waiting.append(row)
        if self.next_wake_s is None:
            self.next_wake_s = now_s
        elif self._num_steps > 1 and not self._chunk:
            whole = max(1, ceil((now_s - self._step_began_s) / self._one_step_s))
            if whole < self._num_steps:
                self._num_steps = whole
                self.next_wake_s = self._step_began_s + whole * self._one_step_s

    def wake(self, now_s: float) -> StepOutcome:
        """Applies the steps that end now and plans the next ones."""
        outcome = StepOutcome()
        self._apply(now_s, outcome)
        self._admit(now_s)
        self._plan(now_s)
        return outcome

    def kill(self) -> list[Row]:
        """The process is gone: everything it held is lost. Answers its requests."""
        rows = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        self.next_wake_s = None
        return rows

    # -- what it reports ----------------------------------------------------------------------------------------

    @property
    def used_tokens(self) -> int:
        """Tokens held by running requests, shared blocks once."""
        return self._private_tokens + self._num_pinned * MOONCAKE_BLOCK_TOKENS

    @property
    def bytes_paged(self) -> float:
        """Bytes of experts brought over the link so far."""
        return self.num_missed * self.spec.expert_bytes

    def snapshot(self, now_s: float) -> WorkerSnapshot:
        """The worker's state now, as its Router will see it later."""
        self._sequence += 1
        self._generation += 1
        spec, byte = self.spec, self.spec.kv_bytes_per_token
        evictable = (len(self._blocks) - self._num_pinned) * MOONCAKE_BLOCK_TOKENS
        full = KindHeadroom(reclaimable_bytes=int(evictable * byte), used_bytes=int(self.used_tokens * byte))
        gap = max(0, spec.kv_tokens - self.used_tokens - evictable)
        while self._recent_retractions and self._recent_retractions[0] < now_s - RATE_WINDOW_S:
            self._recent_retractions.popleft()
        bits = self.cache.resident.to_bytes(self._model.num_cells // 8, "little")
        unfinished = sum(row.prefill_left for row in self.running)
        return WorkerSnapshot(
            sequence=self._sequence,
            time_s=now_s,
            num_steps=self.num_steps,
            num_submitted=self.submitted,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_tokens=unfinished + sum(row.context for row in self.waiting),
            max_running=spec.max_running,
            headroom=Headroom(int(spec.arena_bytes), int(gap * byte), {"full": full}),
            num_finished=self.finished,
            num_retractions=self.retractions,
            retraction_rate=len(self._recent_retractions) / RATE_WINDOW_S,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            step_s=self._one_step_s,
            expert_misses=self.num_missed,
            expert_bytes_paged=int(self.bytes_paged),
            experts=ExpertResidency(self._model.num_layers, self._model.num_experts, self._generation, bits),
        )

    # -- steps --------------------------------------------------------------------------------------------------

    def _apply(self, now_s: float, outcome: StepOutcome) -> None:
        steps, self._num_steps = self._num_steps, 0
        self.num_steps += steps
        for row in self._decoding:
            row.generated += steps
            row.private_tokens += steps
        self._private_tokens += steps * len(self._decoding)
        self.generated_tokens += steps * len(self._decoding)
        for row, tokens in self._chunk:
            row.prefill_left -= tokens
            self.prompt_tokens += tokens
            if row.prefill_left == 0:
                self._share_prompt(row)
                if row.first_token_s < 0:
                    row.first_token_s = now_s
                    outcome.first.append(row)
                    row.generated += 1
                    row.private_tokens += 1
                    self._private_tokens += 1
        for row in [row for row in self.running if row.generated >= row.request.output_tokens]:
            self.running.remove(row)
            self._release(row)
            self.finished += 1
            outcome.finished.append(row)
        self._decoding, self._chunk = [], []

    def _admit(self, now_s: float) -> None:
        while self.waiting and len(self.running) < self.spec.max_running:
            row = self.waiting[0]
            hit = self._match(row.request.blocks)
            left = row.context - len(hit) * MOONCAKE_BLOCK_TOKENS
            newly_pinned = sum(1 for block in hit if self._blocks[block] == 0)
            # Room to grow a little, or the first decode step would send somebody back.
            slack = 64 * (len(self.running) + 1)
            wanted = left + newly_pinned * MOONCAKE_BLOCK_TOKENS + slack
            if self.used_tokens + wanted > self.spec.kv_tokens and self.running:
                return
            self.waiting.popleft()
            self.running.append(row)
            for block in hit:
                self._pin(block)
            row.pinned, row.prefill_left, row.private_tokens = hit, left, left
            row.hit_tokens = len(hit) * MOONCAKE_BLOCK_TOKENS
            self._private_tokens += left
            self.cached_tokens += row.hit_tokens
            self.prompt_tokens += row.hit_tokens
            self._make_room()

    def _plan(self, now_s: float) -> None:
        self._retract_for_growth(now_s)
        if not self.running:
            self.next_wake_s = None
            return
        self._fit_experts()
        budget = self.spec.chunk_tokens
        self._decoding = [row for row in self.running if row.prefill_left == 0]
        compute_s = 0.0
        for row in self.running:
            if row.prefill_left and budget:
                tokens = min(row.prefill_left, budget)
                budget -= tokens
                self._chunk.append((row, tokens))
                context = row.context - row.prefill_left + tokens / 2
                compute_s += tokens * (self.spec.token_s + self.spec.token_context_s * context)
        most = MAX_STEPS_AT_ONCE
        if self._decoding:
            left = min(row.request.output_tokens - row.generated for row in self._decoding)
            room = self.spec.kv_tokens - self.used_tokens
            most = max(1, min(left, MAX_STEPS_AT_ONCE, room // len(self._decoding)))
        decode_s = self._decode_step_s()
        self._step_began_s, self._one_step_s = now_s, decode_s
        if not self._chunk:
            self._num_steps = most
            self._count_missed(most)
            self.next_wake_s = now_s + most * decode_s
            return
        # A chunk's transfers run beside its computation, and decode steps in between at layer boundaries.
        chunk_s = max(compute_s, self._chunk_link_s())
        share = self.spec.decode_share
        self._num_steps = (
            min(most, max(1, int(chunk_s * share / (1 - share) / decode_s))) if self._decoding else 0
        )
        self._count_missed(self._num_steps)
        self.next_wake_s = now_s + chunk_s + self._num_steps * decode_s

    def _chunk_link_s(self) -> float:
        """Seconds of transfer for the chunk's missing experts; they pass through a ring and stay nowhere."""
        by_domain: dict[int, int] = {}
        for row, tokens in self._chunk:
            by_domain[row.request.domain] = by_domain.get(row.request.domain, 0) + tokens
        hot_cells, missed, cold_untouched = 0, 0.0, 1.0
        for number, tokens in by_domain.items():
            hot_share, cold_share = self._domains[number].chunk_share(tokens)
            fresh = self._domains[number].hot & ~hot_cells
            hot_cells |= fresh
            missed += hot_share * (fresh & ~self.cache.resident).bit_count()
            cold_untouched *= 1.0 - cold_share
        cold_cells = self._model.num_cells - (hot_cells | self.cache.resident).bit_count()
        missed += (1.0 - cold_untouched) * cold_cells
        self.num_missed += int(missed)
        return missed * self.spec.expert_bytes / self.spec.link_bytes_per_s

    def _decode_step_s(self) -> float:
        """Seconds of a decode step of the rows that decode, their experts' misses taken from a few drawn steps."""
        spec = self.spec
        rows: dict[int, int] = {}
        for row in self._decoding:
            rows[row.request.domain] = rows.get(row.request.domain, 0) + 1
        missed = 0
        for _ in range(SAMPLED_STEPS if rows else 0):
            used = 0
            for number, count in rows.items():
                used |= self._domains[number].decode_step(count, self._rng)
            missed += self.cache.touch(used)
        self._missed_per_step = missed / SAMPLED_STEPS
        context = sum(row.context for row in self._decoding)
        compute_s = (
            spec.row_s * len(self._decoding) + context * spec.kv_bytes_per_token / spec.hbm_bytes_per_s
        )
        return spec.step_s + compute_s + self._missed_per_step * spec.expert_bytes / spec.link_bytes_per_s

    def _count_missed(self, steps: int) -> None:
        self.num_missed += int(self._missed_per_step * steps)

    # -- memory -------------------------------------------------------------------------------------------------

    def _fit_experts(self) -> None:
        """Experts have what requests and prefix pages leave, above the floor."""
        kept = self.used_tokens + (len(self._blocks) - self._num_pinned) * MOONCAKE_BLOCK_TOKENS
        left = (self.spec.arena_bytes - kept * self.spec.kv_bytes_per_token) / self.spec.expert_bytes
        self.cache.resize(min(self._model.num_cells, max(self.spec.floor_places, int(left))))

    def _retract_for_growth(self, now_s: float) -> None:
        """Sends the row with the least computed tokens back while the next step has no room for all."""
        while len(self.running) > 1 and self.used_tokens + len(self.running) > self.spec.kv_tokens:
            victim = min(self.running, key=lambda row: row.context - row.prefill_left)
            self.running.remove(victim)
            self._release(victim)
            victim.num_retractions += 1
            self.retractions += 1
            self._recent_retractions.append(now_s)
            self.waiting.appendleft(victim)
        self._make_room()

    def _match(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        for depth, block in enumerate(blocks):
            if block not in self._blocks:
                return blocks[:depth]
        return blocks

    def _pin(self, block: int) -> None:
        self._num_pinned += self._blocks[block] == 0
        self._blocks[block] += 1
        self._blocks.move_to_end(block)

    def _share_prompt(self, row: Row) -> None:
        """A computed prompt's blocks become prefix pages, read by this row."""
        for block in reversed(row.request.blocks[len(row.pinned) :]):
            if block not in self._blocks:
                self._blocks[block] = 0
            self._pin(block)
            row.private_tokens -= MOONCAKE_BLOCK_TOKENS
            self._private_tokens -= MOONCAKE_BLOCK_TOKENS
        row.pinned = row.request.blocks

    def _release(self, row: Row) -> None:
        for block in row.pinned:
            self._blocks[block] -= 1
            self._num_pinned -= self._blocks[block] == 0
        self._private_tokens -= row.private_tokens
        row.pinned, row.private_tokens, row.prefill_left = (), 0, 0
        self._make_room()

    def _make_room(self) -> None:
        """Evicts the oldest unread prefix pages beyond their share or in the way of requests."""
        share = int(self.spec.prefix_share * self.spec.arena_bytes / self.spec.kv_bytes_per_token)
        room = min(share, self.spec.kv_tokens - self.used_tokens) // MOONCAKE_BLOCK_TOKENS
        excess = len(self._blocks) - self._num_pinned - max(0, room)
        if excess <= 0:
            return
        unread = [block for block, readers in self._blocks.items() if readers == 0][:excess]
        for block in unread:
            del self._blocks[block]
