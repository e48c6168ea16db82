"""The simplest ledger that is right: a fixed share of the arena per group, one free list each, no moves, no cache.

Virtual and physical page ids are equal. A page's bytes lie where the arena's grids put them: every group has a grid
over the whole buffer (FULL's ends at the arena's end, the others start at byte 0), and this ledger hands out only the
ids whose bytes lie inside the group's own range, so that ranges never overlap. Workers run on the arena ledger; what
stands above it is tested on this one too, so that nothing there leans on how the arena does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memory.api import (
    NO_MATCH,
    Grant,
    Headroom,
    KindHeadroom,
    LedgerError,
    PageAsk,
    PageGrowth,
    PageKind,
    PageRun,
    PageSpec,
    PrefixMatch,
    Shortage,
    StepCommands,
    TableUpdate,
)


@dataclass(slots=True)
class _Run:
    """One request's pages in one group; ``first`` counts the window pages let go before them."""

    first: int = 0
    pages: list[int] = field(default_factory=list)


class _Pool:
    """The pages of one group: ids [low, high), each free, owned, or pending until a step has finished."""

    def __init__(self, spec: PageSpec, low: int, high: int) -> None:
        self.spec = spec
        self.low, self.high = low, high
        ids = range(low, high)
        self.free = deque(reversed(ids) if spec.kind is PageKind.FULL else ids)
        self.runs: dict[int, _Run] = {}
        self.pending: list[tuple[int, int]] = []
        """(last step that may read the page, page)"""
        self.bound: dict[int, int] = {}
        """table entries that the next ``commit_step`` reports"""

    @property
    def num_pages(self) -> int:
        return self.high - self.low

    def missing_pages(self, ask: PageAsk) -> int:
        """How many pages the ask lacks after letting go what its window no longer sees."""
        run = self.runs.get(ask.request)
        held = 0 if run is None else run.first + len(run.pages)
        start = max(held, self.first_visible(ask.num_computed_tokens))
        return max(0, self.last_page(ask.num_tokens) - start)

    def last_page(self, num_tokens: int) -> int:
        """One behind the last logical page of ``num_tokens`` tokens."""
        if self.spec.kind is PageKind.STATE:
            return 1
        return -(-num_tokens // self.spec.page_tokens)

    def first_visible(self, num_computed: int) -> int:
        """First logical page that the query at position ``num_computed``, or a later one, can see."""
        if self.spec.window is None:
            return 0
        return max(0, num_computed - self.spec.window + 1) // self.spec.page_tokens

    def grow(self, ask: PageAsk) -> PageGrowth | None:
        """Appends what is missing; the caller has checked that it is free."""
        run = self.runs.setdefault(ask.request, _Run(self.first_visible(ask.num_computed_tokens)))
        first = run.first + len(run.pages)
        pages = [self.free.popleft() for _ in range(self.missing_pages(ask))]
        run.pages.extend(pages)
        self.bound.update((page, page) for page in pages)
        return PageGrowth(self.spec.name, first, tuple(pages)) if pages else None

    def let_go(self, request: int, num_computed: int, last_step: int) -> None:
        """Frees the leading pages that no later query can see."""
        run = self.runs.get(request)
        if run is None:
            return
        behind = min(self.first_visible(num_computed) - run.first, len(run.pages))
        if behind > 0:
            self.pending.extend((last_step, page) for page in run.pages[:behind])
            del run.pages[:behind]
            run.first += behind

    def release(self, request: int, last_step: int) -> None:
        run = self.runs.pop(request)
        self.pending.extend((last_step, page) for page in run.pages)

    def retire(self, completed: int, pinned: Mapping[int, int]) -> None:
        """Pages whose last reader has finished, and that nothing pins, are free again."""
        waiting = []
        for last_step, page in self.pending:
            if last_step > completed or page in pinned:
                waiting.append((last_step, page))
                continue
            self.free.append(page)
            self.bound[page] = -1
        self.pending = waiting


class FreeListLedger:
    """:class:`memory.api.Ledger` over fixed shares.

    Args:
        specs: the groups of pages; EXPERT groups are not served here.
        arena_bytes: bytes of the arena.
        max_running: how many requests should be able to hold STATE and WINDOW pages at once.
        max_chunk_tokens: most tokens of one request computed in a step; window room covers it.
        side_share: most of the arena that STATE and WINDOW pages may take together.
    """

    def __init__(
        self,
        specs: Sequence[PageSpec],
        arena_bytes: int,
        max_running: int = 64,
        max_chunk_tokens: int = 2048,
        side_share: float = 0.5,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._arena_bytes = arena_bytes
        self._max_chunk_tokens = max_chunk_tokens
        paged = [spec for spec in specs if spec.kind is not PageKind.EXPERT]
        self._pools = {pool.spec.name: pool for pool in self._lay_out(paged, max_running, side_share)}
        self._requests: set[int] = set()
        self._pins: dict[int, list[tuple[str, int]]] = {}
        self._pinned: dict[str, dict[int, int]] = {name: {} for name in self._pools}
        self._num_pins = 0
        self._step = -1
        self._committed = -1
        self._completed = -1

    def _lay_out(self, specs: list[PageSpec], max_running: int, side_share: float) -> list[_Pool]:
        """Ranges from low to high: STATE, WINDOW, then FULL up to the end."""
        order = {PageKind.STATE: 0, PageKind.WINDOW: 1, PageKind.FULL: 2}
        sides = sorted((s for s in specs if s.kind is not PageKind.FULL), key=lambda s: order[s.kind])
        fulls = [spec for spec in specs if spec.kind is PageKind.FULL]
        if len(fulls) > 1:
            raise ValueError("more than one FULL group cannot share the arena's high end")
        wish = {spec.name: self._side_pages(spec) * max_running for spec in sides}
        wished_bytes = sum(spec.page_bytes * wish[spec.name] for spec in sides)
        limit = self._arena_bytes if not fulls else int(self._arena_bytes * side_share)
        shrink = min(1.0, limit / wished_bytes) if wished_bytes else 1.0
        pools, edge = [], 0
        for spec in sides:
            low = -(-edge // spec.page_bytes)
            high = min(low + max(1, int(wish[spec.name] * shrink)), self._arena_bytes // spec.page_bytes)
            pools.append(_Pool(spec, low, max(low, high)))
            edge = max(edge, pools[-1].high * spec.page_bytes)
        for spec in fulls:
            anchor = self._arena_bytes % spec.page_bytes
            low = -(-max(0, edge - anchor) // spec.page_bytes)
            pools.append(_Pool(spec, low, max(low, self._arena_bytes // spec.page_bytes)))
        return pools

    def _side_pages(self, spec: PageSpec) -> int:
        """Most pages one request holds in a STATE or WINDOW group: its chunk and the window before it."""
        if spec.window is None:
            return 1
        return -(-(spec.window - 1 + self._max_chunk_tokens) // spec.page_tokens) + 1

    @property
    def specs(self) -> Mapping[str, PageSpec]:
        return self._specs

    def begin_step(self, step: int, completed_step: int) -> None:
        if step <= self._step or completed_step >= step or completed_step < self._completed:
            raise LedgerError(f"step {step} (completed {completed_step}) begun after {self._step}")
        self._step, self._completed = step, completed_step
        self._retire()

    def _retire(self) -> None:
        for name, pool in self._pools.items():
            pool.retire(self._completed, self._pinned[name])

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        return NO_MATCH

    def grant(self, ask: PageAsk) -> Grant | Shortage:
        if ask.match.num_tokens:
            raise LedgerError("a ledger without a prefix cache was asked to share a prefix")
        pools = self._pools.values()
        # What a window no longer sees is let go first: with no step in flight it is room for this very ask.
        for pool in pools:
            pool.let_go(ask.request, ask.num_computed_tokens, self._committed)
        self._retire()
        missing = {
            pool.spec.name: lacking * pool.spec.page_bytes
            for pool in pools
            if (lacking := pool.missing_pages(ask) - len(pool.free)) > 0
        }
        if missing:
            never = self.can_ever_grant(ask.num_tokens) is not None
            pending = sum(len(self._pools[name].pending) * self._specs[name].page_bytes for name in missing)
            return Shortage(missing, pending, never)
        self._requests.add(ask.request)
        growth = [pool.grow(ask) for pool in pools]
        return Grant(tuple(entry for entry in growth if entry is not None))

    def can_ever_grant(self, num_tokens: int) -> Shortage | None:
        """None, or all bytes that the request would take, by group."""
        need: dict[str, int] = {}
        for name, pool in self._pools.items():
            need[name] = pool.last_page(num_tokens)
            if pool.spec.window is not None:
                need[name] = min(need[name], self._side_pages(pool.spec))
        if all(need[name] <= pool.num_pages for name, pool in self._pools.items()):
            return None
        return Shortage(
            {name: pages * self._specs[name].page_bytes for name, pages in need.items()}, never=True
        )

    def capacity_tokens(self, request: int) -> int:
        held = [
            (run.first + len(run.pages)) * pool.spec.page_tokens
            for pool in self._pools.values()
            if pool.spec.kind is not PageKind.STATE and (run := pool.runs.get(request)) is not None
        ]
        # A model of recurrent layers only has no token pages: its one state takes any number of tokens.
        return min(held, default=2**62 if request in self._requests else 0)

    def pages(self, request: int, group: str) -> PageRun:
        run = self._pools[group].runs.get(request)
        if run is None:
            raise LedgerError(f"request {request} holds no pages in {group!r}")
        return PageRun(run.first, tuple(run.pages))

    def checkpoint(
        self,
        request: int,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str = "",
        rolling: bool = False,
    ) -> bool:
        return False

    def release(
        self, request: int, token_ids: Sequence[int] = (), num_computed_tokens: int = 0, salt: str = ""
    ) -> None:
        if request not in self._requests:
            raise LedgerError(f"request {request} was released twice or never granted")
        self._requests.remove(request)
        for pool in self._pools.values():
            pool.release(request, self._committed)
        self._retire()

    def release_bytes(self, request: int) -> int:
        return sum(
            len(p.runs[request].pages) * p.spec.page_bytes for p in self._pools.values() if request in p.runs
        )

    def pin(self, request: int) -> int:
        held = [(name, page) for name, pool in self._pools.items() for page in pool.runs[request].pages]
        for name, page in held:
            self._pinned[name][page] = self._pinned[name].get(page, 0) + 1
        self._num_pins += 1
        self._pins[self._num_pins] = held
        return self._num_pins

    def unpin(self, pin: int) -> None:
        if pin not in self._pins:
            raise LedgerError(f"pin {pin} was ended twice or never made")
        for name, page in self._pins.pop(pin):
            count = self._pinned[name].pop(page) - 1
            if count:
                self._pinned[name][page] = count

    def commit_step(self, step: int) -> StepCommands:
        if step != self._step or self._committed >= step:
            raise LedgerError(f"step {step} committed while step {self._step} is open")
        self._committed = step
        updates = []
        for name, pool in self._pools.items():
            if pool.bound:
                updates.append(TableUpdate(name, tuple(pool.bound), tuple(pool.bound.values())))
                pool.bound = {}
        return StepCommands(step, table=tuple(updates))

    def end_step(self, step: int) -> None:
        if step > self._committed:
            raise LedgerError(f"step {step} ended before it was committed")

    def headroom(self) -> Headroom:
        kinds = {}
        for name, pool in self._pools.items():
            size = pool.spec.page_bytes
            kinds[name] = KindHeadroom(
                free_bytes=len(pool.free) * size,
                pending_bytes=len(pool.pending) * size,
                pinned_bytes=len(self._pinned[name]) * size,
                used_bytes=sum(len(run.pages) for run in pool.runs.values()) * size,
            )
        return Headroom(self._arena_bytes, 0, kinds)

    def audit(self) -> None:
        for name, pool in self._pools.items():
            owned = [page for run in pool.runs.values() for page in run.pages]
            seen = sorted([*pool.free, *owned, *(page for _, page in pool.pending)])
            if seen != list(range(pool.low, pool.high)):
                raise LedgerError(f"pages of {name!r} are lost or have two owners")
            if set(pool.runs) != self._requests:
                raise LedgerError(
                    f"{name!r} holds pages of requests that the ledger does not know, or lacks some"
                )
