"""The pages of all groups: hands them out, counts who holds them, frees their bytes when no step reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from memory.api import PageCopy
from memory.ledger.deferred import DeferredFrees
from memory.ledger.extents import Layout
from memory.ledger.page_table import MUTABLE, PageTable
from memory.ledger.relocation import Relocator

NO_STEP = -1
_LATER = 1 << 60
"""Seal of a page that a queued copy will write: not sealed before that copy's step is known."""


class PageBook:
    """One table and one pool per group, by group number (order of the layout, from low to high).

    ``open_step`` is the step being planned (NO_STEP between steps), ``committed_step`` the last one handed out,
    ``completed_step`` the last one finished on the device.
    """

    def __init__(self, layout: Layout, move_budget_bytes: int, urgent_budget_bytes: int) -> None:
        self.layout = layout
        self.pools = layout.pools
        self.tables = [PageTable(pool.spec.name) for pool in self.pools]
        self.number = {pool.spec.name: index for index, pool in enumerate(self.pools)}
        self.deferred = DeferredFrees()
        self.relocator = Relocator(layout, self.tables, self.deferred, move_budget_bytes, urgent_budget_bytes)
        self.open_step = NO_STEP
        self.committed_step = NO_STEP
        self.completed_step = NO_STEP
        self._in_flight: deque[int] = deque()
        self._copies: list[
            tuple[int, int, int]
        ] = []  # (group, source, target), virtual pages held until commit

    def hand_out(self) -> None:
        """The open step's commands leave: it is in flight."""
        self.committed_step, self.open_step = self.open_step, NO_STEP
        self._in_flight.append(self.committed_step)

    # -- pages ---------------------------------------------------------------------------------------------------

    def new_page(self, group: int) -> int:
        """A fresh virtual page with one user; the caller has made sure that the pool has a free page."""
        table = self.tables[group]
        virtual = table.new()
        table.bind(virtual, self.pools[group].take(virtual))
        self.relocator.fresh[group].add(virtual)
        return virtual

    def drop(self, group: int, virtual: int) -> None:
        """One user of a page less; steps handed out so far may still read it for that user."""
        if self.tables[group].drop(virtual, self.committed_step):
            self._free(group, virtual)

    def forget(self, group: int, virtuals: Iterable[int]) -> None:
        """The prefix tree lets pages go."""
        for virtual in virtuals:
            if self.tables[group].forget(virtual):
                self._free(group, virtual)

    def unpin(self, group: int, virtual: int) -> None:
        """One pin of a page less."""
        if self.tables[group].unpin(virtual):
            self._free(group, virtual)

    def keep(self, group: int, virtuals: Iterable[int]) -> None:
        """The prefix tree takes fully written pages: from the next step on nothing writes them."""
        table = self.tables[group]
        for virtual in virtuals:
            table.keep(virtual)
            self.seal(group, virtual)

    def seal(self, group: int, virtual: int) -> None:
        """All writers of the page belong to steps already handed out."""
        table = self.tables[group]
        if table.sealed[virtual] == MUTABLE:
            table.sealed[virtual] = self.committed_step + 1

    def copy(self, group: int, source: int, target: int) -> None:
        """Queues a copy between virtual pages ahead of the next step; both are held until it is handed out. The
        caller's own hold on ``target`` is taken over."""
        table = self.tables[group]
        table.hold(source)
        if table.sealed[target] != MUTABLE:
            table.sealed[target] = _LATER
        self._copies.append((group, source, target))

    def read_by(self, group: int, virtual: int, step: int) -> None:
        """Ends a hold that a queued copy had: from now on ``step`` uses the page."""
        if self.tables[group].drop(virtual, step):
            self._free(group, virtual)

    def written_by(self, group: int, virtual: int, step: int) -> None:
        """A copy ahead of ``step`` writes the page: if it is sealed, it is so only behind that step."""
        table = self.tables[group]
        if table.sealed[virtual] != MUTABLE:
            table.sealed[virtual] = step + 1

    def take_copies(self, step: int) -> tuple[PageCopy, ...]:
        """The queued copies with the physical pages of ``step``, once."""
        found = []
        for group, source, target in self._copies:
            table = self.tables[group]
            found.append(PageCopy(table.group, table.physical[source], table.physical[target]))
        for group, source, target in self._copies:
            self.written_by(group, target, step)
            for virtual in (source, target):
                self.read_by(group, virtual, step)
        self._copies.clear()
        return tuple(found)

    def queued_holds(self) -> list[tuple[int, int]]:
        """(group, virtual page) of every hold by a queued copy, for the audit."""
        return [(group, virtual) for group, *pair in self._copies for virtual in pair]

    # -- bytes ---------------------------------------------------------------------------------------------------

    def retire(self, completed_step: int) -> None:
        """Steps up to ``completed_step`` have finished: copies flip, bytes that waited for them are free.

        Only numbers of steps that were handed out count, so that "the next step" may be written as the last plus one.
        """
        while self._in_flight and self._in_flight[0] <= completed_step:
            self.completed_step = self._in_flight.popleft()
        self.relocator.flip(self.completed_step, self.committed_step)
        for group, page in self.deferred.retire(self.completed_step):
            self.pools[group].free(page)

    def pending_bytes(self) -> int:
        """Bytes that come free when steps in flight are done."""
        return sum(pool.num_pending * pool.page_bytes for pool in self.pools)

    def _free(self, group: int, virtual: int) -> None:
        table, pool = self.tables[group], self.pools[group]
        due = max(table.last_step[virtual], self.relocator.abandon(group, virtual))
        if self.relocator.moved(group, virtual):
            due = max(due, self.committed_step + 1)  # at the earliest, the step that will carry the move
        page = table.unbind(virtual)
        if due <= self.completed_step:
            pool.free(page)
        else:
            pool.defer(page)
            self.deferred.add(due, group, page)
