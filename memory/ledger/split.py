"""Fixed shares: gives every group its part of the arena for good, from ratios, as ``memory_mode=split``."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import PageKind
from memory.ledger.extents import typical_bytes
from memory.ledger.page_pool import Anchor, PagePool


def fix_shares(
    pools: Sequence[PagePool], arena_bytes: int, split_ratio: float, place_bytes: int, floor_places: int
) -> None:
    """Sets the pools' extents, given from low to high: STATE and WINDOW share ``split_ratio`` of what the floor of
    expert places leaves, FULL gets the rest; within a side, by the bytes of a typical request."""
    shared = arena_bytes - floor_places * place_bytes
    if floor_places:
        shared -= place_bytes  # bands end between places; the floor must be whole places
    full = [pool for pool in pools if pool.spec.kind is PageKind.FULL]
    side = [pool for pool in pools if pool.spec.kind is not PageKind.FULL]
    ratio = 0.0 if not side else 1.0 if not full else split_ratio
    cursor = 0
    for group, share in ((side, ratio), (full, 1.0 - ratio)):
        weights = [typical_bytes(pool.spec) for pool in group]
        room = int(shared * share)
        for pool, weight in zip(group, weights, strict=True):
            num_bytes = room * weight // sum(weights)
            if pool.anchor is Anchor.HIGH:
                pages = num_bytes // pool.page_bytes
                pool.place_at(pool.grid.num_pages)
                pool.grow_down(min(pages, pool.grid.num_pages - pool.grid.page_up(cursor)))
                continue
            pool.place_at(pool.grid.page_up(cursor))
            pool.grow_up(max(0, pool.grid.page_down(cursor + num_bytes) - pool.last))
            cursor = pool.high_byte
