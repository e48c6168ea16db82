"""Decides which bytes of the arena belong to which group: extents from both ends, floats between, the gap for experts.

    0 [LOW ->]   [<- FLOAT ->] ...  gap  ...  [<- HIGH] arena_bytes

What no extent covers is the gap, where expert places lie. A band grows only while the gap keeps ``floor_places``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memory.api import LedgerError, PageKind, PageSpec
from memory.ledger.page_pool import Anchor, PagePool
from memory.ledger.spans import Span, merged, without

_TYPICAL_TOKENS = 4096
"""Length of the request whose bytes per kind place a float for the first time; only a hint, floats move."""


def arrange(specs: Sequence[PageSpec], arena_bytes: int) -> list[PagePool]:
    """Pools from low to high: STATE, WINDOW, FULL; the first takes the low end, the last FULL the high end."""
    order = {PageKind.STATE: 0, PageKind.WINDOW: 1, PageKind.FULL: 2}
    paged = sorted((s for s in specs if s.kind is not PageKind.EXPERT), key=lambda s: order[s.kind])
    pools = []
    for index, spec in enumerate(paged):
        if index == len(paged) - 1 and spec.kind is PageKind.FULL:
            anchor = Anchor.HIGH
        else:
            anchor = Anchor.LOW if index == 0 else Anchor.FLOAT
        pools.append(PagePool(spec, arena_bytes, anchor))
    return pools


def typical_bytes(spec: PageSpec) -> int:
    """Bytes that a request of typical length holds in a group: the weight of its first share of the arena."""
    if spec.kind is PageKind.STATE:
        return spec.page_bytes
    tokens = _TYPICAL_TOKENS if spec.window is None else min(_TYPICAL_TOKENS, spec.window + spec.page_tokens)
    return -(-tokens // spec.page_tokens) * spec.page_bytes


class Layout:
    """The extents of all pools, given from low to high.

    Args:
        place_bytes: step of the expert grid, 0 without experts.
        floor_places: whole places that growing bands must leave in the gap.
        stride_bytes: bands grow by at least so much where there is room.
        rigid: extents never change (fixed shares).
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        arena_bytes: int,
        place_bytes: int = 0,
        floor_places: int = 0,
        stride_bytes: int = 0,
        rigid: bool = False,
    ) -> None:
        self.pools = list(pools)
        self.arena_bytes = arena_bytes
        self.place_bytes = place_bytes
        self.floor_places = floor_places
        self.rigid = rigid
        self.rings: list[Span] = []
        """Byte ranges of the gap that something else holds for a while (staging rings)."""
        self.strides = [max(1, -(-stride_bytes // pool.page_bytes)) for pool in self.pools]
        weights = [typical_bytes(pool.spec) for pool in self.pools]
        self._hints = [sum(weights[:i]) * arena_bytes // sum(weights) for i in range(len(weights))]

    # -- looking -------------------------------------------------------------------------------------------------

    def blocks(self) -> list[Span]:
        """Byte ranges outside the gap, sorted."""
        extents = [(pool.low_byte, pool.high_byte) for pool in self.pools if pool.num_pages]
        return merged([*extents, *self.rings])

    def gaps(self) -> list[Span]:
        """Byte ranges of the gap, sorted."""
        return without([(0, self.arena_bytes)], self.blocks())

    def gap_bytes(self) -> int:
        """Bytes of the gap that bands may grow into: what the floor leaves, nothing with fixed shares."""
        if self.rigid:
            return 0
        gap = sum(high - low for low, high in self.gaps())
        return max(0, gap - self.floor_places * self.place_bytes)

    def places_in(self, low: int, high: int) -> int:
        """Whole expert places inside a byte range."""
        if not self.place_bytes:
            return 0
        return max(0, high // self.place_bytes - -(-low // self.place_bytes))

    def usable_places(self) -> int:
        """Whole expert places in the gap."""
        return sum(self.places_in(low, high) for low, high in self.gaps())

    def sides(self, index: int) -> tuple[bool, ...]:
        """The sides (True: upward) on which a band may grow, the roomier first."""
        anchor = self.pools[index].anchor
        if anchor is Anchor.LOW:
            return (True,)
        if anchor is Anchor.HIGH:
            return (False,)
        return (True, False) if self.room(index, True) >= self.room(index, False) else (False, True)

    def neighbour(self, index: int, up: bool) -> int:
        """The next pool with pages on that side; -1 if there is none, or a ring lies between."""
        others = range(index + 1, len(self.pools)) if up else range(index - 1, -1, -1)
        found = next((other for other in others if self.pools[other].num_pages), -1)
        if found >= 0 and self._edge(index, up) in [low if up else high for low, high in self.rings]:
            return -1
        return found

    def _edge(self, index: int, up: bool) -> int:
        """How far a band could reach: the near byte of what lies next to it."""
        pool = self.pools[index]
        if up:
            taken = [other.low_byte for other in self.pools[index + 1 :] if other.num_pages]
            taken += [low for low, _ in self.rings if low >= pool.high_byte]
            return min(taken, default=self.arena_bytes)
        taken = [other.high_byte for other in self.pools[:index] if other.num_pages]
        taken += [high for _, high in self.rings if high <= pool.low_byte]
        return max(taken, default=0)

    def room(self, index: int, up: bool) -> int:
        """Pages by which a band can grow on one side without touching a neighbour or the floor."""
        pool = self.pools[index]
        if self.rigid or (pool.anchor is not Anchor.FLOAT and up is not (pool.anchor is Anchor.LOW)):
            return 0
        edge = self._edge(index, up)
        size, places = self.place_bytes, self._floor_beside(index, up)
        if up:
            if places:
                edge = (edge // size - places) * size
            return max(0, pool.grid.page_down(edge) - pool.last)
        if places:
            edge = (-(-edge // size) + places) * size
        return max(0, pool.first - pool.grid.page_up(edge))

    def clearance(self, index: int, up: bool, pages: int) -> int:
        """The byte to which the neighbour on one side must withdraw for a band to grow by ``pages`` there."""
        pool, size, places = self.pools[index], self.place_bytes, self._floor_beside(index, up)
        edge = pool.grid.anchor_bytes + (pool.last + pages if up else pool.first - pages) * pool.page_bytes
        if not places:
            return edge
        return (-(-edge // size) + places) * size if up else (edge // size - places) * size

    def _floor_beside(self, index: int, up: bool) -> int:
        """Places that the gap beside a band must keep, because the other gaps do not make up the floor."""
        if not self.floor_places:
            return 0
        pool, edge = self.pools[index], self._edge(index, up)
        other_side = self.usable_places()
        if pool.num_pages:
            other_side -= self.places_in(pool.high_byte, edge) if up else self.places_in(edge, pool.low_byte)
        else:  # the gap is still whole here: growing cuts it in two
            far, here = self._edge(index, not up), pool.low_byte
            other_side -= self.places_in(min(far, edge), max(far, edge))
            other_side += self.places_in(min(far, here), max(far, here))
        return max(0, self.floor_places - other_side)

    # -- changing ------------------------------------------------------------------------------------------------

    def grow(self, index: int, need: int) -> bool:
        """Adds ``need`` pages to a band, or up to a stride more where there is room; nothing if they do not fit."""
        pool = self.pools[index]
        if self.rigid:
            return False
        if pool.num_pages == 0:
            self._place(index)
        first, last, left = pool.first, pool.last, need
        for up in self.sides(index):
            room = self.room(index, up)
            stride = self.strides[index]
            grown = min(room, -(-left // stride) * stride)
            if up:
                pool.grow_up(grown)
            else:
                pool.grow_down(grown)
            left -= grown
            if left <= 0:
                return True
        pool.shrink_high(pool.last - last)
        pool.shrink_low(first - pool.first)
        return False

    def _place(self, index: int) -> None:
        """Chooses where an empty band begins: the ends at their ends, a float at its hint where that is free."""
        pool = self.pools[index]
        if pool.anchor is not Anchor.FLOAT:
            pool.place_at(pool.grid.num_pages if pool.anchor is Anchor.HIGH else 0)
            return
        below = max((other.high_byte for other in self.pools[:index] if other.num_pages), default=0)
        above = min(
            (other.low_byte for other in self.pools[index + 1 :] if other.num_pages), default=self.arena_bytes
        )
        open_gaps = [(max(low, below), min(high, above)) for low, high in self.gaps()]
        open_gaps = [(low, high) for low, high in open_gaps if low < high] or [(below, below)]
        hint = self._hints[index]
        low, high = max(open_gaps, key=lambda gap: (gap[0] <= hint < gap[1], gap[1] - gap[0]))
        start = hint if low <= hint < high else (low + high) // 2
        page = pool.grid.page_up(start)
        pool.place_at(page if pool.grid.address(page) <= high else pool.grid.page_down(high))

    def retreat(self, index: int, keep: int) -> int:
        """Gives free pages at a band's edges back to the gap while ``keep`` free pages stay; answers how many went."""
        pool = self.pools[index]
        if self.rigid or pool.num_free <= keep:
            return 0
        before = pool.num_pages
        if pool.anchor is not Anchor.HIGH:
            pool.shrink_high(min(pool.free_at_high(), pool.num_free - keep))
        if pool.anchor is not Anchor.LOW:
            pool.shrink_low(min(pool.free_at_low(), pool.num_free - keep))
        return before - pool.num_pages

    # -- rings ---------------------------------------------------------------------------------------------------

    def add_ring(self, num_places: int) -> Span | None:
        """Takes ``num_places`` adjacent places out of the middle of the widest gap, as a byte range; None if the
        floor forbids it or no gap is wide enough."""
        if not self.place_bytes or self.usable_places() - num_places < self.floor_places:
            return None
        low, high = max(self.gaps(), key=lambda gap: self.places_in(*gap))
        spare = self.places_in(low, high) - num_places
        if spare < 0:
            return None
        first = (-(-low // self.place_bytes) + spare // 2) * self.place_bytes
        ring = (first, first + num_places * self.place_bytes)
        self.rings.append(ring)
        return ring

    def drop_ring(self, ring: Span) -> None:
        """Gives a ring's bytes back to the gap."""
        if ring not in self.rings:
            raise LedgerError(f"no ring at bytes {ring}")
        self.rings.remove(ring)


def fits_empty(
    pools: Sequence[PagePool], need: Mapping[str, int], arena_bytes: int, place_bytes: int, floor_places: int
) -> bool:
    """Whether ``need[group]`` pages of every group fit an otherwise empty arena, grids and floor included.

    Each float may cut the gap once more, wherever it happens to lie, which costs up to two whole places.
    """
    cursor, high = 0, arena_bytes
    for pool in pools:
        count = need.get(pool.spec.name, 0)
        if pool.anchor is Anchor.HIGH:
            high = pool.grid.anchor_bytes + (pool.grid.num_pages - count) * pool.page_bytes
        else:
            first = pool.grid.page_up(cursor)
            cursor = pool.grid.address(first + count)
    if not floor_places:
        return cursor <= high
    floor_places += 2 * sum(pool.anchor is Anchor.FLOAT for pool in pools)
    return high // place_bytes - -(-cursor // place_bytes) >= floor_places
