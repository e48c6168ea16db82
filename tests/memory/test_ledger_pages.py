"""Pools, tables and deferred frees: who owns a page, and misuse that must raise."""

from __future__ import annotations

import pytest

from memory.api import LedgerError
from memory.ledger.deferred import DeferredFrees
from memory.ledger.page_pool import BOUND, TARGET, Anchor, PagePool
from memory.ledger.page_table import PageTable
from memory.ledger.spans import SpanSet, common, merged, without
from tests.memory.geometries import full_spec


def _pool(num_pages: int = 6, anchor: Anchor = Anchor.LOW) -> PagePool:
    spec = full_spec(16)
    pool = PagePool(spec, 10 * spec.page_bytes, anchor)
    if anchor is Anchor.HIGH:
        pool.grow_down(num_pages)
    else:
        pool.grow_up(num_pages)
    return pool


def test_pages_are_handed_out_outermost_first() -> None:
    low, high = _pool(), _pool(anchor=Anchor.HIGH)
    assert [low.take(v) for v in range(3)] == [0, 1, 2]
    assert [high.take(v) for v in range(3)] == [9, 8, 7]
    for page in (1, 0):
        low.free(page)
    assert [low.take(v) for v in (7, 8, 9)] == [0, 1, 3]
    assert low.owner[3] == 9


def test_freeing_a_page_twice_raises() -> None:
    pool = _pool()
    pool.take(0)
    pool.free(0)
    with pytest.raises(LedgerError, match="freed twice"):
        pool.free(0)
    with pytest.raises(LedgerError, match="freed twice"):
        pool.defer(0)


def test_a_pending_page_is_not_handed_out() -> None:
    pool = _pool(2)
    page = pool.take(0)
    pool.defer(page)
    assert (pool.take(1), pool.num_free, pool.num_pending) == (1, 0, 1)
    with pytest.raises(LedgerError, match="no free page"):
        pool.take(2)
    pool.free(page)
    assert pool.take(2) == page


def test_extents_give_up_free_pages_only() -> None:
    pool = _pool()
    pool.take_at(5, BOUND, 0)
    with pytest.raises(LedgerError, match="in use"):
        pool.shrink_high(1)
    pool.free(5)
    assert pool.free_at_high() == 6
    pool.shrink_high(4)
    assert (pool.num_pages, pool.num_free) == (2, 2)
    pool.take(0), pool.take(1)
    pool.grow_up(2)
    assert [pool.take(2), pool.take(3)] == [2, 3], "a regrown page is handed out once"
    with pytest.raises(LedgerError, match="leave the arena"):
        pool.grow_up(7)


def test_stale_heap_entries_neither_leak_nor_grow() -> None:
    pool = _pool(8)
    for _ in range(3000):
        pool.shrink_high(4)
        pool.grow_up(4)
    assert len(pool._heap) < 2200
    assert [pool.take(v) for v in range(8)] == list(range(8))


def test_a_move_target_must_be_free_and_settles_once() -> None:
    pool = _pool()
    pool.take(0)
    with pytest.raises(LedgerError, match="not free"):
        pool.take_at(0, TARGET, 1)
    pool.take_at(3, TARGET, 0)
    pool.settle(3)
    with pytest.raises(LedgerError, match="no move's target"):
        pool.settle(3)


def test_a_page_ends_when_the_last_holder_lets_go() -> None:
    table = PageTable("full")
    page = table.new()
    table.bind(page, 4)
    table.hold(page)
    table.keep(page)
    table.pin(page)
    assert [table.drop(page, 3), table.drop(page, 5), table.unpin(page), table.forget(page)] == [
        False,
        False,
        False,
        True,
    ]
    assert table.last_step[page] == 5
    assert table.unbind(page) == 4
    update = table.difference()
    assert update is not None
    assert (update.virtual, update.physical) == ((page,), (-1,))
    assert table.difference() is None


def test_pins_nest() -> None:
    table = PageTable("full")
    page = table.new()
    table.bind(page, 0)
    table.pin(page)
    table.pin(page)
    assert not table.drop(page, 0)
    assert not table.unpin(page)
    assert table.num_pinned == 1
    assert table.unpin(page)
    with pytest.raises(LedgerError, match="not pinned"):
        table.unpin(page)


@pytest.mark.parametrize("act", ["drop", "forget", "hold", "keep", "pin"])
def test_unknown_and_dead_virtual_pages_raise(act: str) -> None:
    table = PageTable("full")
    page = table.new()
    table.bind(page, 0)
    table.drop(page, 0)
    table.unbind(page)
    arguments = (page, 0) if act == "drop" else (page,)
    with pytest.raises(LedgerError):
        getattr(table, act)(*arguments)
    if act in ("hold", "keep", "pin"):
        with pytest.raises(LedgerError, match="no virtual page"):
            getattr(table, act)(77)


def test_deferred_frees_wait_for_their_step() -> None:
    deferred = DeferredFrees()
    deferred.add(7, 0, 1)
    deferred.add(5, 1, 2)
    deferred.add(7, 0, 3)
    assert deferred.retire(4) == []
    assert deferred.retire(6) == [(1, 2)]
    assert deferred.pages() == [(0, 1), (0, 3)]
    assert deferred.retire(9) == [(0, 1), (0, 3)]
    assert deferred.retire(99) == []


def test_span_arithmetic() -> None:
    assert merged([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == [(0, 3), (5, 9)]
    assert without([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert common([(0, 4), (6, 9)], [(3, 7)]) == [(3, 4), (6, 7)]
    spans = SpanSet()
    for span in [(10, 20), (40, 50), (20, 25), (24, 41)]:
        spans.add(*span)
    assert spans.spans() == [(10, 50)]
    assert spans.touches(49, 60)
    assert not spans.touches(50, 60)
    assert not spans.touches(0, 10)
