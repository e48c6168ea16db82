"""Proves the ledger's invariants by recounting: one owner per page, bytes conserved, extents in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from memory.api import LedgerError
from memory.ledger.book import PageBook
from memory.ledger.extents import Layout
from memory.ledger.page_pool import ABSENT, BOUND, FREE, PENDING, TARGET, PagePool
from memory.ledger.page_table import PageTable
from memory.ledger.prefix_tree import PrefixTree


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise LedgerError(f"audit: {what}")


def audit_layout(layout: Layout) -> None:
    """Extents lie in order inside the arena, apart from each other and from rings; the floor is kept."""
    spans = [(pool.low_byte, pool.high_byte) for pool in layout.pools if pool.num_pages]
    for (_, high), (low, _) in pairwise(spans):
        _expect(high <= low, f"an extent that ends at byte {high} reaches over the next one's begin {low}")
    for low, high in spans:
        _expect(0 <= low <= high <= layout.arena_bytes, f"extent {low}..{high} leaves the arena")
        for ring_low, ring_high in layout.rings:
            _expect(
                high <= ring_low or low >= ring_high, f"extent {low}..{high} overlaps the ring at {ring_low}"
            )
    if layout.floor_places:
        _expect(layout.usable_places() >= layout.floor_places, "the gap is below the floor of expert places")


def audit_pages(
    book: PageBook,
    held: Sequence[Sequence[int]],
    pinned: Sequence[Sequence[int]],
    queued: Sequence[tuple[int, int]],
) -> None:
    """Every page has exactly one owner.

    ``held``: by group, the virtual pages of all requests, once per holder; ``pinned``: those of all pins;
    ``queued``: (group, virtual page) per hold of a queued copy.
    """
    deferred = book.deferred.pages()
    for group, (pool, table) in enumerate(zip(book.pools, book.tables, strict=True)):
        _audit_pool(pool)
        _audit_bindings(pool, table, book.relocator.copying[group])
        waiting = [page for owner, page in deferred if owner == group]
        _expect(len(set(waiting)) == len(waiting), f"{pool.spec.name}: a page waits twice")
        in_state = [p for p in range(pool.first, pool.last) if pool.state[p] == PENDING]
        _expect(sorted(waiting) == in_state, f"{pool.spec.name}: pending pages and waiting frees differ")
        users = Counter(held[group])
        users.update(virtual for owner, virtual in queued if owner == group)
        pins = Counter(pinned[group])
        for virtual, physical in enumerate(table.physical):
            anybody = users[virtual] + pins[virtual] + table.cached[virtual]
            # A page that is as it should be costs no sentence: there are tens of thousands.
            wrong = (
                "has a wrong count of users" * (table.users[virtual] != users[virtual])
                or "has a wrong count of pins" * (table.pins[virtual] != pins[virtual])
                or "has a wrong count of holders" * (table.holders[virtual] != anybody)
                or "is held without a page, or has one that nobody holds" * ((physical >= 0) != (anybody > 0))
            )
            if wrong:
                raise LedgerError(f"audit: {pool.spec.name}: virtual page {virtual} {wrong}")
        _audit_counters(table)


def _audit_pool(pool: PagePool) -> None:
    name = pool.spec.name
    inside = pool.state[pool.first : pool.last]
    outside = len(pool.state) - len(inside)
    _expect(inside.count(ABSENT) == 0, f"{name}: pages of the extent are missing")
    _expect(pool.state.count(ABSENT) == outside, f"{name}: pages live outside the extent")
    _expect(inside.count(FREE) == pool.num_free, f"{name}: free pages miscounted")
    _expect(inside.count(PENDING) == pool.num_pending, f"{name}: pending pages miscounted")


def _audit_bindings(pool: PagePool, table: PageTable, copying: dict[int, tuple[int, int]]) -> None:
    name = pool.spec.name
    for page in range(pool.first, pool.last):
        state, owner = pool.state[page], pool.owner[page]
        if state == BOUND:
            if not (0 <= owner < len(table.physical) and table.physical[owner] == page):
                raise LedgerError(f"audit: {name}: page {page} and its owner disagree")
        elif state == TARGET:
            _expect(copying.get(owner, (-1, 0))[0] == page, f"{name}: page {page} waits for no copy")
        elif owner != -1:
            raise LedgerError(f"audit: {name}: page {page} without content has an owner")
    bound = [physical for physical in table.physical if physical >= 0]
    _expect(len(set(bound)) == len(bound), f"{name}: two virtual pages share one physical page")
    _expect(len(bound) == table.num_bound, f"{name}: virtual pages miscounted")
    _expect(
        all(pool.state[page] == BOUND for page in bound), f"{name}: a virtual page points at unbound bytes"
    )
    _expect(
        all(pool.state[target] == TARGET for target, _ in copying.values()), f"{name}: a copy lost its target"
    )


def _audit_counters(table: PageTable) -> None:
    numbers = range(len(table.physical))
    pinned = sum(table.pins[v] > 0 for v in numbers)
    alone = sum(table.cached[v] and not table.users[v] and not table.pins[v] for v in numbers)
    _expect(table.num_pinned == pinned, f"{table.group}: pinned pages miscounted")
    _expect(table.num_cached_only == alone, f"{table.group}: cached pages miscounted")


def audit_cache(book: PageBook, tree: PrefixTree) -> None:
    """The tree and the tables agree on what the tree holds."""
    tree.audit()
    held = tree.held_bytes()
    for pool, table in zip(book.pools, book.tables, strict=True):
        cached = [virtual for virtual, kept in enumerate(table.cached) if kept]
        name = pool.spec.name
        _expect(all(tree.holds(name, virtual) for virtual in cached), f"{name}: the tree lost a page")
        _expect(
            len(cached) * pool.page_bytes == held.get(name, 0), f"{name}: the tree holds pages unknown here"
        )
