"""States for operators and tests what the arena looks like now: bands, holes, gap, moves, prefix tree, host tier."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memory.ledger.book import PageBook
from memory.ledger.cache import PrefixCache
from memory.ledger.headroom import measure
from memory.ledger.places import ExpertPlaces
from memory.ledger.spill import HostSpill


def report_arena(
    book: PageBook, places: ExpertPlaces, cache: PrefixCache | None, spill: HostSpill | None
) -> dict[str, Any]:
    """Plain values that JSON can carry; costs a few microseconds per group of pages, whatever their number.

    ``bands`` go from low to high addresses. In each, ``bound`` pages have an owner, ``holes`` are free pages inside the
    band, ``pending`` ones wait for steps in flight, ``copying`` ones are targets of moves under way: together they are
    all pages of the band.
    """
    layout = book.layout
    reclaimable = cache.reclaimable_bytes() if cache is not None else [0] * len(book.pools)
    headroom = measure(book, reclaimable)
    return {
        "arena_bytes": layout.arena_bytes,
        "mode": "split" if layout.rigid else "arena",
        "steps": {"committed": book.committed_step, "completed": book.completed_step},
        "bands": [_band(book, group) for group in range(len(book.pools))],
        "gap": {
            "bytes": layout.gap_bytes(),
            "spans": [[low, high] for low, high in layout.gaps()],
            "rings": [[low, high] for low, high in layout.rings],
            "place_bytes": layout.place_bytes,
            "places_usable": places.num_usable,
            "places_draining": places.num_draining,
            "floor_places": layout.floor_places,
        },
        "moves": {
            **asdict(book.relocator.totals),
            "under_way": sum(len(copying) for copying in book.relocator.copying),
        },
        "tree": None if cache is None else cache.report(),
        "host_tier": None if spill is None else spill.report(),
        "headroom": {"available_bytes": headroom.available_bytes, **asdict(headroom)},
    }


def _band(book: PageBook, group: int) -> dict[str, Any]:
    pool, table = book.pools[group], book.tables[group]
    copying = len(book.relocator.copying[group])
    return {
        "group": pool.spec.name,
        "kind": pool.spec.kind.value,
        "anchor": pool.anchor.value,
        "page_bytes": pool.page_bytes,
        "low_byte": pool.low_byte,
        "high_byte": pool.high_byte,
        "pages": pool.num_pages,
        "bound": table.num_bound,
        "holes": pool.num_free,
        "pending": pool.num_pending,
        "copying": copying,
        "cached_only": table.num_cached_only,
        "pinned": table.num_pinned,
    }
