"""The one book the scheduler asks: one arena for every kind of page, one all-or-nothing grant over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memory.api import (
    NO_MATCH,
    PAGE_ALIGN_BYTES,
    Grant,
    Headroom,
    LedgerError,
    PageAsk,
    PageGrowth,
    PageKind,
    PageRun,
    PageSpec,
    PlaceRange,
    PrefixMatch,
    Shortage,
    StepCommands,
)
from memory.ledger.admission import Admission
from memory.ledger.audit import audit_cache, audit_layout, audit_pages
from memory.ledger.book import NO_STEP, PageBook
from memory.ledger.cache import PrefixCache
from memory.ledger.extents import Layout, arrange
from memory.ledger.headroom import measure
from memory.ledger.holding import NO_NODE, Holding
from memory.ledger.host_tier import HostTier
from memory.ledger.market import MarketDecision, PrefixReading
from memory.ledger.places import ExpertPlaces
from memory.ledger.prefix_tree import PrefixTree
from memory.ledger.report import report_arena
from memory.ledger.room import RoomMaker
from memory.ledger.specs import Grid
from memory.ledger.spill import HostSpill
from memory.ledger.split import fix_shares

_NOTHING = Grant()


class ArenaLedger:
    """:class:`memory.api.Ledger` over one arena whose bands grow into each other's room.

    Args:
        specs: the groups of pages; an EXPERT spec gives ``expert_place_bytes`` where that is 0.
        arena_bytes: bytes of the arena, rounded down to whole lines of PAGE_ALIGN_BYTES.
        expert_place_bytes: step of the expert grid; 0: no experts in the arena.
        floor_places: expert places that page bands never take.
        mode: ``arena``, or ``split`` for fixed shares per kind.
        split_ratio: with ``split``, the share of STATE and WINDOW pages together.
        move_budget_bytes: most bytes moved in the background per step.
        urgent_budget_bytes: most bytes moved per step to make room for grants.
        stride_bytes: bands grow and retreat by at least so much; at least one expert place.
        max_chunk_tokens: most tokens of one request computed in a step; window room covers it.
        prefix_tree: keeps finished prefixes; None: nothing is kept.
        host_tier: keeps copies of cached pages in host memory behind the tree.
        host_budget_bytes: most bytes copied to the host tier per step.
    """

    def __init__(
        self,
        specs: Sequence[PageSpec],
        arena_bytes: int,
        *,
        expert_place_bytes: int = 0,
        floor_places: int = 0,
        mode: str = "arena",
        split_ratio: float = 0.5,
        move_budget_bytes: int = 64 << 20,
        urgent_budget_bytes: int = 2 << 30,
        stride_bytes: int = 0,
        max_chunk_tokens: int = 2048,
        prefix_tree: PrefixTree | None = None,
        host_tier: HostTier | None = None,
        host_budget_bytes: int = 64 << 20,
    ) -> None:
        if mode not in ("arena", "split"):
            raise ValueError(f"memory_mode={mode!r} must be 'arena' or 'split'")
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("two page specs carry one name")
        experts = [spec.page_bytes for spec in specs if spec.kind is PageKind.EXPERT]
        arena_bytes = arena_bytes // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES
        place_bytes = expert_place_bytes or max(experts, default=0)
        pools = arrange(specs, arena_bytes)
        rigid = mode == "split"
        if rigid:
            fix_shares(pools, arena_bytes, split_ratio, place_bytes, floor_places)
        self._layout = Layout(
            pools, arena_bytes, place_bytes, floor_places, max(stride_bytes, place_bytes), rigid
        )
        self._book = PageBook(self._layout, move_budget_bytes, urgent_budget_bytes)
        self._places = ExpertPlaces(arena_bytes, place_bytes)
        self._paged = [pool.spec for pool in pools]
        self._windows = [g for g, spec in enumerate(self._paged) if spec.window is not None]
        self._tokens = [g for g, spec in enumerate(self._paged) if spec.kind is not PageKind.STATE]
        self._admission = Admission(self._book, max_chunk_tokens)
        self._spill = None
        if host_tier is not None and prefix_tree is not None:
            self._spill = HostSpill(
                self._book, host_tier, host_budget_bytes, prefix_tree.blocks, prefix_tree.cost
            )
        self._cache = PrefixCache(self._book, prefix_tree, self._spill) if prefix_tree is not None else None
        self._room = RoomMaker(self._book, self._cache)
        self._requests: dict[int, Holding] = {}
        self._hold_new = False
        self._pins: dict[int, tuple[list[tuple[int, int]], int]] = {}  # pin -> (pages, node)
        self._num_pins = 0

    # -- a step's life -------------------------------------------------------------------------------------------

    @property
    def specs(self) -> Mapping[str, PageSpec]:
        """The page specs by group name."""
        return self._specs

    @property
    def grids(self) -> Mapping[str, Grid]:
        """Where each group's physical pages lie; fixed for the ledger's life."""
        return {pool.spec.name: pool.grid for pool in self._book.pools}

    def begin_step(self, step: int, completed_step: int) -> None:
        """See :class:`memory.api.Ledger`."""
        book = self._book
        if book.open_step != NO_STEP or step <= book.committed_step:
            raise LedgerError(
                f"step {step} begins while {book.open_step} is open or after {book.committed_step}"
            )
        if completed_step > (book.committed_step if book.committed_step != NO_STEP else step - 1):
            raise LedgerError(
                f"step {completed_step} cannot be done, only {book.committed_step} was handed out"
            )
        book.open_step = step
        self._retire(completed_step)
        if self._cache is not None:
            self._cache.begin_step()
        self._room.give_back()

    def commit_step(self, step: int) -> StepCommands:
        """See :class:`memory.api.Ledger`."""
        book = self._book
        if step != book.open_step:
            raise LedgerError(f"step {step} is not open")
        self._room.compact(step)
        read = book.relocator.still_read(book.completed_step)
        ban, allow = self._places.update(self._layout.blocks(), read, step, book.completed_step)
        moves = book.relocator.take_moves(step)
        back = self._spill.take_back(step) if self._spill is not None else ()
        copies = back + book.take_copies(step)
        if self._spill is not None:
            copies += self._spill.take_out(step)
        if self._cache is not None:
            self._cache.end_uses()
        updates = (table.difference() for table in book.tables)
        table = tuple(update for update in updates if update is not None)
        book.hand_out()
        return StepCommands(step, ban, moves, copies, table, allow)

    def end_step(self, step: int) -> None:
        """See :class:`memory.api.Ledger`."""
        if step > self._book.committed_step:
            raise LedgerError(f"step {step} ends before it was handed out")
        self._retire(step)

    def _retire(self, completed_step: int) -> None:
        self._book.retire(completed_step)
        if self._spill is not None:
            self._spill.retire(completed_step)

    # -- asking --------------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """See :class:`memory.api.Ledger`. A match whose states could not be copied in an empty arena is no match."""
        if self._cache is None or len(token_ids) < 2:
            return NO_MATCH
        found = self._cache.match(token_ids, salt)
        if found.num_tokens and self._admission.never(len(token_ids), num_states=2):
            return NO_MATCH
        return found

    def grant(self, ask: PageAsk) -> Grant | Shortage:
        """See :class:`memory.api.Ledger`. A match evicted meanwhile is answered by an empty Shortage, and so is
        a first ask while the market holds new requests back and others run."""
        holding = self._requests.get(ask.request)
        if holding is None:
            return self._grant_first(ask)
        if ask.match.num_tokens:
            raise LedgerError(f"request {ask.request} holds pages already and cannot start from a match")
        self._let_go_behind(holding, ask.num_computed_tokens)
        self._seal(holding, ask.num_computed_tokens)
        need = holding.lacking(self._paged, ask.num_tokens)
        if not need:
            return _NOTHING
        if not self._room.make(need):
            return self._admission.shortage(need)
        return self._append(holding, need)

    def _grant_first(self, ask: PageAsk) -> Grant | Shortage:
        if self._hold_new and self._requests:
            return Shortage({})
        holding = Holding(len(self._paged))
        if not ask.match.num_tokens or self._cache is None:
            self._let_go_behind(holding, ask.num_computed_tokens)
            need = holding.lacking(self._paged, ask.num_tokens)
            if not self._room.make(need):
                return self._admission.shortage(need)
            grant = self._append(holding, need)
        else:
            found = self._cache.open(ask.match)
            if found is None:
                return Shortage({})
            for group, (first, pages) in found.shared.items():
                holding.runs[group].first, holding.runs[group].pages = first, list(pages)
            need = holding.lacking(self._paged, ask.num_tokens)
            self._cache.lock(found.node)
            if not self._room.make(need):
                self._cache.unlock(found.node)
                return self._admission.shortage(need)
            grant = self._append(holding, need)
            self._cache.share(holding, found)
        self._requests[ask.request] = holding
        return grant

    def _append(self, holding: Holding, need: Mapping[int, int]) -> Grant:
        growth = []
        for group, count in need.items():
            run = holding.runs[group]
            first = run.end
            pages = [self._book.new_page(group) for _ in range(count)]
            run.pages += pages
            growth.append(PageGrowth(self._paged[group].name, first, tuple(pages)))
        holding.measure(self._paged)
        return Grant(tuple(growth))

    def _let_go_behind(self, holding: Holding, num_computed_tokens: int) -> None:
        """Drops the window pages that no later query can see."""
        for group in self._windows:
            for page in holding.behind(group, self._paged[group], num_computed_tokens):
                self._book.drop(group, page)

    def _seal(self, holding: Holding, num_computed_tokens: int) -> None:
        """Seals the pages that steps handed out so far have written to the end."""
        for group in self._tokens:
            run = holding.runs[group]
            written = min(num_computed_tokens // self._paged[group].page_tokens, run.end)
            for logical in range(max(run.num_sealed, run.first), written):
                self._book.seal(group, run.pages[logical - run.first])
            run.num_sealed = max(run.num_sealed, written)

    def can_ever_grant(self, num_tokens: int) -> Shortage | None:
        """See :class:`memory.api.Ledger`."""
        return self._admission.never(num_tokens)

    # -- holding -------------------------------------------------------------------------------------------------

    def capacity_tokens(self, request: int) -> int:
        """See :class:`memory.api.Ledger`; 0 for a request without pages."""
        holding = self._requests.get(request)
        return 0 if holding is None else holding.capacity_tokens

    def pages(self, request: int, group: str) -> PageRun:
        """See :class:`memory.api.Ledger`."""
        run = self._holding(request).runs[self._book.number[group]]
        return PageRun(run.first, tuple(run.pages))

    def checkpoint(
        self,
        request: int,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str = "",
        rolling: bool = False,
    ) -> bool:
        """See :class:`memory.api.Ledger`."""
        holding = self._holding(request)
        if self._cache is None:
            return False
        return self._cache.checkpoint(holding, token_ids, num_tokens, salt, self._room.make, rolling)

    def release(
        self, request: int, token_ids: Sequence[int] = (), num_computed_tokens: int = 0, salt: str = ""
    ) -> None:
        """See :class:`memory.api.Ledger`. ``num_computed_tokens`` is exactly where a STATE stands, or 0."""
        holding = self._holding(request)
        if self._cache is not None:
            if token_ids:
                self._cache.donate(holding, token_ids, num_computed_tokens, salt)
            self._cache.leave(holding)
        del self._requests[request]
        for group, run in enumerate(holding.runs):
            for page in run.pages:
                self._book.drop(group, page)

    def release_bytes(self, request: int) -> int:
        """See :class:`memory.api.Ledger`."""
        runs, book = self._holding(request).runs, self._book
        return sum(
            table.count_alone(run.pages) * pool.page_bytes
            for run, table, pool in zip(runs, book.tables, book.pools, strict=True)
        )

    def pin(self, request: int) -> int:
        """See :class:`memory.api.Ledger`. A pin outlives its request; its reader starts behind the step
        that is committed next, when all moves planned before the pin have run."""
        holding = self._holding(request)
        pages = [(group, page) for group, run in enumerate(holding.runs) for page in run.pages]
        for group, page in pages:
            self._book.tables[group].pin(page)
        if self._cache is not None and holding.node != NO_NODE:
            self._cache.tree.lock(holding.node, bundle=False)
        self._num_pins += 1
        self._pins[self._num_pins] = (pages, holding.node)
        return self._num_pins

    def unpin(self, pin: int) -> None:
        """See :class:`memory.api.Ledger`."""
        if pin not in self._pins:
            raise LedgerError(f"there is no pin {pin}")
        pages, node = self._pins.pop(pin)
        for group, page in pages:
            self._book.unpin(group, page)
        if self._cache is not None and node != NO_NODE:
            self._cache.tree.unlock(node, bundle=False)

    def _holding(self, request: int) -> Holding:
        holding = self._requests.get(request)
        if holding is None:
            raise LedgerError(f"request {request} holds no pages")
        return holding

    # -- experts and the market ----------------------------------------------------------------------------------

    @property
    def num_usable_places(self) -> int:
        """Expert places that the device may use as of the last committed step."""
        return self._places.num_usable

    def take_ring(self, num_places: int) -> PlaceRange | None:
        """Bans adjacent places of the gap for a staging ring, from the next committed step on; None if the gap above
        the floor has no such run now."""
        ring = self._layout.add_ring(num_places)
        if ring is None:
            return None
        return PlaceRange(ring[0] // self._layout.place_bytes, ring[1] // self._layout.place_bytes)

    def return_ring(self, places: PlaceRange) -> None:
        """Gives a ring's places back; experts may use them when the steps handed out so far have finished."""
        size = self._layout.place_bytes
        ring = (places.first * size, places.last * size)
        self._layout.drop_ring(ring)
        self._book.relocator.vacated.add(*ring)

    def shed(self, need: Mapping[str, int]) -> int:
        """Evicts cached pages until ``need[group]`` bytes are let go; answers the bytes."""
        if self._cache is None:
            return 0
        return self._cache.evict({self._book.number[name]: num_bytes for name, num_bytes in need.items()})

    def flush(self) -> int:
        """Lets every cached prefix go that no request uses, here and in the host tier; answers the bytes."""
        freed = self.shed(dict.fromkeys(self._book.number, self.headroom().arena_bytes))
        return freed + (self._spill.clear() if self._spill is not None else 0)

    def prefix_reading(self) -> PrefixReading:
        """The prefix side's totals for the market."""
        return self._cache.reading() if self._cache is not None else PrefixReading(0.0, 0.0, 0, 0)

    def follow(self, decision: MarketDecision) -> int:
        """Does what the market decided: lets the cheapest prefixes go, and chooses who gives way to grants from now
        on, and whether requests may start beside others; answers the bytes let go. Moves of the coming steps bring
        the holes to the frontier."""
        self._room.spare_prefixes = decision.spare_prefixes
        self._hold_new = decision.hold_new
        if self._cache is None or not decision.evict_bytes:
            return 0
        return self._cache.forget(self._cache.tree.evict_cheapest(decision.evict_bytes).pages)

    # -- figures and proof ---------------------------------------------------------------------------------------

    def headroom(self) -> Headroom:
        """See :class:`memory.api.Ledger`."""
        return measure(self._book, self._cache.reclaimable_bytes() if self._cache else [0] * len(self._paged))

    def report(self) -> dict[str, Any]:
        """Bands, holes, gap, moves, tree, host tier and headroom, as :func:`memory.ledger.report.report_arena` says."""
        return report_arena(self._book, self._places, self._cache, self._spill)

    def held_back_bytes(self) -> int:
        """Bytes of the gap that no page may take: the floor of expert places and staging rings."""
        gap = sum(high - low for low, high in self._layout.gaps())
        rings = sum(high - low for low, high in self._layout.rings)
        return gap - self._layout.gap_bytes() + rings

    def audit(self) -> None:
        """See :class:`memory.api.Ledger`."""
        held = [
            [page for h in self._requests.values() for page in h.runs[g].pages]
            for g in range(len(self._paged))
        ]
        pinned = [
            [page for pages, _ in self._pins.values() for g, page in pages if g == n]
            for n in range(len(held))
        ]
        audit_layout(self._layout)
        queued = self._book.queued_holds()
        if self._spill is not None:
            queued += self._spill.queued_holds()
            self._spill.tier.audit()
        audit_pages(self._book, held, pinned, queued)
        if self._cache is not None:
            audit_cache(self._book, self._cache.tree)
