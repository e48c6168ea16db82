"""Makes room for one joint ask over all groups, in three steps of rising cost: in place, compacted ends, moved floats.

    1. holes; then bands grow into the gap and expert places there give way
    2. the band next door gives up its edge: free pages at once, pages in use into its own holes
    3. a float next door moves on, into room at its far side

Evicting cached prefixes comes after all three: a move costs microseconds, a lost prefix its recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memory.ledger.book import PageBook
from memory.ledger.cache import PrefixCache
from memory.ledger.page_pool import Anchor

_ATTEMPTS = 3
"""Rounding to the grids of two bands and of the expert places can leave a push, or an eviction, a page short."""


_TIGHT_SHARE = 16
"""Without experts, bands are only compacted while the gap is below this part of the arena: else nobody needs it."""


class RoomMaker:
    """Rearranges extents until an ask fits; all or nothing as far as the ask goes (a changed layout is no harm)."""

    def __init__(self, book: PageBook, cache: PrefixCache | None) -> None:
        self._book = book
        self._layout = book.layout
        self._pools = book.pools
        self._relocator = book.relocator
        self._cache = cache
        self.spare_prefixes = True
        """Whether the gap gives way before cached prefixes do; otherwise, with experts in the gap, they go first."""

    def make(self, need: Mapping[int, int]) -> bool:
        """True: every group has ``need[group number]`` free pages now. False: there is no room without sending
        somebody back; nothing is evicted where that could not be enough."""
        if not self.spare_prefixes and self._layout.place_bytes:
            self._evict_own(need)
        if self.in_place(need) or self.by_moving(need):
            return True
        if self._cache is None:
            return False
        for extra in range(_ATTEMPTS):
            order = self._eviction_order(need, self._cache.reclaimable_bytes(), extra)
            if order is None or not self._cache.evict(order):
                return False
            if self.in_place(need) or self.by_moving(need):
                return True
        return False

    def _evict_own(self, need: Mapping[int, int]) -> None:
        """Evicts what the asking groups lack from their own cached pages, as far as those go."""
        if self._cache is None:
            return
        mine = self._cache.reclaimable_bytes()
        short = {
            g: (pages - self._pools[g].num_free) * self._pools[g].page_bytes for g, pages in need.items()
        }
        order = {group: min(num_bytes, mine[group]) for group, num_bytes in short.items()}
        if any(num_bytes > 0 for num_bytes in order.values()):
            self._cache.evict(order)

    def lacking_bytes(self, need: Mapping[int, int]) -> int:
        """Bytes that ``need`` (pages by group number) lacks even if every free byte could serve it; 0: it may fit."""
        if self._layout.rigid:
            return sum(
                max(0, pages - self._pools[g].num_free) * self._pools[g].page_bytes
                for g, pages in need.items()
            )
        free = self._layout.gap_bytes() + sum(pool.num_free * pool.page_bytes for pool in self._pools)
        return max(0, sum(pages * self._pools[g].page_bytes for g, pages in need.items()) - free)

    def in_place(self, need: Mapping[int, int]) -> bool:
        """Step 1. True: every group has its pages free now."""
        done = True
        for group, pages in need.items():
            lacking = pages - self._pools[group].num_free
            if lacking > 0 and not self._layout.grow(group, lacking):
                done = False
        return done

    def by_moving(self, need: Mapping[int, int]) -> bool:
        """Steps 2 and 3."""
        if self._layout.rigid or self.lacking_bytes(need):
            return False
        for group, pages in need.items():
            lacking = pages - self._pools[group].num_free
            if lacking > 0 and not self._push(group, lacking, need):
                return False
        return self.in_place(need)

    def _push(self, group: int, pages: int, need: Mapping[int, int]) -> bool:
        """Makes ``pages`` of room beside a band and lets it grow into it."""
        layout = self._layout
        for up in layout.sides(group):
            other_side = layout.room(group, not up)
            self._clear(group, up, pages - other_side, need, depth=0)
            if layout.grow(group, pages):
                return True
        return False

    def _clear(self, group: int, up: bool, pages: int, need: Mapping[int, int], depth: int) -> None:
        """Makes the neighbour withdraw until ``pages`` fit beside the band, as far as that goes."""
        layout = self._layout
        other = layout.neighbour(group, up)
        if other < 0 or layout.room(group, up) >= pages or depth >= len(self._pools):
            return
        band, keep, edge = self._pools[other], need.get(other, 0), layout.clearance(group, up, pages)
        self._relocator.vacate(other, not up, edge, keep)
        if layout.room(group, up) >= pages or band.anchor is not Anchor.FLOAT:
            return
        # The float lacks room to move on: push what lies beyond it, then try once more.
        short = edge - band.low_byte if up else band.high_byte - edge
        moved = -(-short // band.page_bytes) - max(0, band.num_free - keep)
        self._clear(other, up, moved, need, depth + 1)
        self._relocator.vacate(other, not up, edge, keep)

    def _eviction_order(
        self, need: Mapping[int, int], mine: Sequence[int], extra: int
    ) -> dict[int, int] | None:
        """Bytes by group to evict for ``need``, the asking groups' own pages first; None if it cannot be enough."""
        pools = self._pools
        if self._layout.rigid:
            short = {g: (pages - pools[g].num_free) * pools[g].page_bytes for g, pages in need.items()}
            enough = all(num_bytes <= mine[g] for g, num_bytes in short.items())
            return {g: num_bytes for g, num_bytes in short.items() if num_bytes > 0} if enough else None
        lacking = self.lacking_bytes(need)
        if lacking > sum(mine):
            return None
        # Edges of grids and pages that cannot move eat some of what is freed: ask for a page more each round.
        lacking += sum(pools[group].page_bytes for group in need) * (extra + 1)
        order: dict[int, int] = {}
        for group in [*need, *sorted(set(range(len(pools))) - need.keys(), key=lambda group: -mine[group])]:
            share = min(lacking, mine[group])
            if share > 0:
                order[group] = share
                lacking -= share
        return order

    # -- giving back ---------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """With experts in the arena, bands with two strides of free pages retreat to one."""
        if self._layout.rigid or not self._layout.place_bytes:
            return
        for group, stride in enumerate(self._layout.strides):
            if self._pools[group].num_free >= 2 * stride:
                self._layout.retreat(group, stride)

    def compact(self, step: int) -> None:
        """Moves a few pages into holes where the room behind them is wanted, unless grants moved some already."""
        layout = self._layout
        wanted = layout.place_bytes or layout.gap_bytes() * _TIGHT_SHARE < layout.arena_bytes
        if layout.rigid or not wanted or self._relocator.num_planned:
            return
        budget = self._relocator.move_budget_bytes
        for group, pool in enumerate(self._pools):
            stride = layout.strides[group]
            if pool.num_free >= 2 * stride:
                budget -= self._relocator.plan_moves(group, step, self._book.completed_step, stride, budget)
