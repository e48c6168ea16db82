"""Measures what is left, group by group, so that every byte of the arena is counted exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import Headroom, KindHeadroom
from memory.ledger.book import PageBook


def measure(book: PageBook, reclaimable_bytes: Sequence[int]) -> Headroom:
    """The headroom now. ``reclaimable_bytes``: by group number, bytes that eviction from the prefix tree brings.

    A pinned page counts as pinned, whoever holds it; of the rest, pages that a request holds are used, pages that
    only the tree holds are reclaimable as far as they can be evicted, and the targets of copies under way pending.
    """
    kinds = {}
    for group, (pool, table) in enumerate(zip(book.pools, book.tables, strict=True)):
        size = pool.page_bytes
        pending = pool.num_pending + len(book.relocator.copying[group])
        reclaimable = reclaimable_bytes[group]
        used = (table.num_bound - table.num_pinned) * size - reclaimable
        kinds[pool.spec.name] = KindHeadroom(
            free_bytes=pool.num_free * size,
            reclaimable_bytes=reclaimable,
            pending_bytes=pending * size,
            pinned_bytes=table.num_pinned * size,
            used_bytes=used,
        )
    return Headroom(book.layout.arena_bytes, book.layout.gap_bytes(), kinds)
