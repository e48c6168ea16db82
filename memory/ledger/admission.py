"""Says no with the bytes named: what an ask lacks now, and what no arena of this size could ever hold."""

from __future__ import annotations

from collections.abc import Mapping

from memory.api import PageKind, Shortage
from memory.ledger.book import PageBook
from memory.ledger.extents import fits_empty
from memory.ledger.specs import most_pages


class Admission:
    """Prices of requests against a book's arena. ``max_chunk_tokens``: most tokens of one request in a step."""

    def __init__(self, book: PageBook, max_chunk_tokens: int) -> None:
        self._book = book
        self._max_chunk_tokens = max_chunk_tokens

    def shortage(self, need: Mapping[int, int]) -> Shortage:
        """What ``need`` (pages by group number) lacks beyond holes and the gap, the gap credited once; at least a page
        where bytes there are lie wrong."""
        pools, gap_left = self._book.pools, self._book.layout.gap_bytes()
        missing: dict[str, int] = {}
        for group, pages in need.items():
            pool = pools[group]
            short = max(0, pages - pool.num_free) * pool.page_bytes
            credit = min(gap_left, short)
            gap_left -= credit
            if short:
                missing[pool.spec.name] = max(1, -(-(short - credit) // pool.page_bytes)) * pool.page_bytes
        return Shortage(missing, self._book.pending_bytes())

    def never(self, num_tokens: int, num_states: int = 1) -> Shortage | None:
        """None if a request of ``num_tokens`` fits the empty arena, else its bytes by group. ``num_states``: state
        pages it needs at once, two while it starts from a cached one."""
        layout, pools = self._book.layout, self._book.pools
        need = {
            pool.spec.name: num_states
            if pool.spec.kind is PageKind.STATE
            else most_pages(pool.spec, num_tokens, self._max_chunk_tokens)
            for pool in pools
        }
        if layout.rigid:
            fits = all(need[pool.spec.name] <= pool.num_pages for pool in pools)
        else:
            fits = fits_empty(pools, need, layout.arena_bytes, layout.place_bytes, layout.floor_places)
        if fits:
            return None
        return Shortage(
            {pool.spec.name: need[pool.spec.name] * pool.page_bytes for pool in pools}, never=True
        )
