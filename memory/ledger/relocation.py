"""Plans which pages move where: urgently, to make room for a grant, or a few bytes a step to let bands retreat.

A *sealed* page may be copied beside running steps; its table entry flips once the step that carried the copy has
finished. Every other move happens on the compute stream between two steps, together with the table patch; its old
bytes can be written again by that same step, but take no other move of the batch, which runs in no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memory.api import Move
from memory.ledger.deferred import DeferredFrees
from memory.ledger.extents import Layout
from memory.ledger.page_pool import BOUND, FREE, PENDING, TARGET, Anchor, PagePool
from memory.ledger.page_table import MUTABLE, PageTable
from memory.ledger.spans import Span, SpanSet, merged


@dataclass(slots=True)
class MoveTotals:
    """Moves handed out since the start: beside the steps (sealed pages), and between them."""

    num_beside: int = 0
    beside_bytes: int = 0
    num_between: int = 0
    between_bytes: int = 0


class Relocator:
    """Moves of the open step, and copies of earlier steps that have not flipped yet.

    Args:
        layout, tables: what is rearranged, by group number.
        deferred: takes the bytes of flipped pages.
        move_budget_bytes: most bytes that :meth:`plan_moves` moves in a step.
        urgent_budget_bytes: most bytes that grants of one step move together.
    """

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[PageTable],
        deferred: DeferredFrees,
        move_budget_bytes: int,
        urgent_budget_bytes: int,
    ) -> None:
        self._layout = layout
        self._pools: list[PagePool] = layout.pools
        self._tables = tables
        self._deferred = deferred
        self.move_budget_bytes = move_budget_bytes
        self.urgent_budget_bytes = urgent_budget_bytes
        self.totals = MoveTotals()
        self.vacated = SpanSet()
        """Bytes that this step's moves leave behind: no move of the batch may write them."""
        self.copying: list[dict[int, tuple[int, int]]] = [{} for _ in self._pools]
        """By group: virtual page -> (target, step that carries the copy)."""
        self._vacated_before: list[tuple[int, list[Span]]] = []  # (step, bytes) of steps still in flight
        self.fresh: list[set[int]] = [set() for _ in self._pools]
        """By group: pages that the open step brought; nothing is in them yet, so they go elsewhere without a copy."""
        self._moves: list[Move] = []
        self._moved: list[dict[int, int]] = [{} for _ in self._pools]
        """By group: virtual page -> index of its move in the open step's list."""
        self._urgent_bytes = 0

    # -- one page ------------------------------------------------------------------------------------------------

    def movable(self, group: int, virtual: int) -> bool:
        """Whether nothing holds the page where it is: no pin, no copy under way."""
        return not self._tables[group].pins[virtual] and virtual not in self.copying[group]

    def may_copy_beside(self, group: int, virtual: int, completed_step: int) -> bool:
        """Whether all writers of the page have finished. Into one that the open step brought, something may be copied
        ahead of that step; one that it moves is not there yet."""
        sealed = self._tables[group].sealed[virtual]
        awaited = virtual in self.fresh[group] or virtual in self._moved[group]
        return sealed != MUTABLE and sealed - 1 <= completed_step and not awaited

    def moved(self, group: int, virtual: int) -> bool:
        """Whether a move of the open step writes the page."""
        return virtual in self._moved[group]

    def move_now(self, group: int, page: int, target: int) -> None:
        """Moves a page on the compute stream ahead of the open step. One that the step moves already goes to the new
        target instead: nothing is read from the old one, which is free at once."""
        pool, table = self._pools[group], self._tables[group]
        virtual = pool.owner[page]
        pool.take_at(target, BOUND, virtual)
        table.bind(virtual, target)
        pool.free(page)
        if virtual in self.fresh[group]:
            return
        if virtual in self._moved[group]:
            number = self._moved[group][virtual]
            self._moves[number] = replace(self._moves[number], target=target)
            return
        self.totals.num_between += 1
        self.totals.between_bytes += pool.page_bytes
        low = pool.grid.address(page)
        self.vacated.add(low, low + pool.page_bytes)
        self._moved[group][virtual] = len(self._moves)
        self._moves.append(Move(pool.spec.name, virtual, page, target, sealed=False))

    def copy_beside(self, group: int, page: int, target: int, step: int) -> None:
        """Copies a sealed page beside running steps; :meth:`flip` ends it."""
        pool = self._pools[group]
        virtual = pool.owner[page]
        pool.take_at(target, TARGET, virtual)
        self.copying[group][virtual] = (target, step)
        self.totals.num_beside += 1
        self.totals.beside_bytes += pool.page_bytes
        self._moves.append(Move(pool.spec.name, virtual, page, target, sealed=True))

    def flip(self, completed_step: int, committed_step: int) -> None:
        """Points the pages whose copies are done at their new bytes; the old ones wait for ``committed_step``, the
        last whose table named them. A page pinned meanwhile stays where its reader found it."""
        for group, copying in enumerate(self.copying):
            done = [(v, target) for v, (target, step) in copying.items() if step <= completed_step]
            pool, table = self._pools[group], self._tables[group]
            for virtual, target in done:
                del copying[virtual]
                if table.pins[virtual]:
                    pool.free(target)
                    continue
                source = table.physical[virtual]
                pool.settle(target)
                table.bind(virtual, target)
                pool.defer(source)
                self._deferred.add(committed_step, group, source)

    def abandon(self, group: int, virtual: int) -> int:
        """A page ends while it is being copied: its target waits for the copy. Answers the copy's step, or -1."""
        if virtual not in self.copying[group]:
            return -1
        target, step = self.copying[group].pop(virtual)
        self._pools[group].defer(target)
        self._deferred.add(step, group, target)
        return step

    def still_read(self, completed_step: int) -> list[Span]:
        """Bytes that moves of the open step, or of steps in flight, leave behind: no copy beside the steps may write
        them, and no expert."""
        self._vacated_before = [entry for entry in self._vacated_before if entry[0] > completed_step]
        return merged(
            span for spans in [self.vacated.spans(), *(s for _, s in self._vacated_before)] for span in spans
        )

    def take_moves(self, step: int) -> tuple[Move, ...]:
        """The open step's moves, once; the next step starts afresh."""
        moves = tuple(self._moves)
        if spans := self.vacated.spans():
            self._vacated_before.append((step, spans))
        self._moves.clear()
        self.vacated.clear()
        self._urgent_bytes = 0
        for table, moved in zip(self._tables, self._moved, strict=True):
            for virtual in moved:
                table.last_step[virtual] = max(table.last_step[virtual], step)
            moved.clear()
        for fresh in self.fresh:
            fresh.clear()
        return moves

    @property
    def num_planned(self) -> int:
        """Moves planned in the open step so far."""
        return len(self._moves)

    # -- urgent --------------------------------------------------------------------------------------------------

    def vacate(self, group: int, high: bool, to_byte: int, keep_free: int) -> None:
        """Withdraws a band's edge (the high one, or the low one) towards ``to_byte``, now, as far as it goes.

        Pages in the way go to the band's holes, outermost first; a float that lacks holes grows at its other side.
        ``keep_free`` free pages stay in the band. A page that cannot move, or the byte budget, ends it early.
        """
        pool = self._pools[group]
        required = pool.num_pages - pool.num_free + keep_free
        edge = pool.grid.page_down(to_byte) if high else pool.grid.page_up(to_byte)
        lacking = required - (edge - pool.first if high else pool.last - edge)
        if lacking > 0 and pool.anchor is Anchor.FLOAT:
            grown = min(lacking, self._layout.room(group, not high))
            if high:
                pool.grow_down(grown)
            else:
                pool.grow_up(grown)
        if high:
            wanted = pool.last - max(edge, pool.first + required)
        else:
            wanted = min(edge, pool.last - required) - pool.first
        if wanted <= 0:
            return
        inward = (
            range(pool.last - 1, pool.last - 1 - wanted, -1)
            if high
            else range(pool.first, pool.first + wanted)
        )
        targets = iter(self._targets(pool, (pool.first, pool.last), wanted, from_low=high))
        cleared = 0
        for page in inward:
            if pool.state[page] != FREE and not self._move_away(group, page, next(targets, page), high):
                break
            cleared += 1
        if high:
            pool.shrink_high(cleared)
        else:
            pool.shrink_low(cleared)

    def _move_away(self, group: int, page: int, target: int, high: bool) -> bool:
        """Moves one page from the edge to a target further inside; False if that cannot be."""
        pool = self._pools[group]
        inside = target < page if high else target > page
        again = self.moved(group, pool.owner[page])
        spent = self._urgent_bytes + (0 if again else pool.page_bytes)
        # The first page always goes: one larger than the budget must be able to move some day.
        if not inside or (self._urgent_bytes and spent > self.urgent_budget_bytes):
            return False
        if pool.state[page] != BOUND or not self.movable(group, pool.owner[page]):
            return False
        self.move_now(group, page, target)
        self._urgent_bytes = spent
        return True

    def _targets(
        self, pool: PagePool, span: tuple[int, int], count: int, from_low: bool, avoid: SpanSet | None = None
    ) -> list[int]:
        """Up to ``count`` free pages of ``span`` outside ``avoid``: the bytes that this step's moves leave behind."""
        avoid = avoid or self.vacated
        found: list[int] = []
        low, high = span
        while len(found) < count:
            page = pool.find_free(low, high, from_low=from_low)
            if page < 0:
                break
            if from_low:
                low = page + 1
            else:
                high = page
            address = pool.grid.address(page)
            if not avoid.touches(address, address + pool.page_bytes):
                found.append(page)
        return found

    # -- in the background ---------------------------------------------------------------------------------------

    def plan_moves(
        self, group: int, step: int, completed_step: int, keep_free: int, budget_bytes: int
    ) -> int:
        """Moves pages from a band's edge into its outermost holes until only ``keep_free`` holes would be left behind
        the edge, or ``budget_bytes`` are spent; answers the bytes. Sealed pages are copied beside the steps."""
        pool = self._pools[group]
        from_high = pool.anchor is not Anchor.HIGH
        affordable = budget_bytes // pool.page_bytes
        if not affordable and budget_bytes == self.move_budget_bytes > 0:
            affordable = 1  # a page larger than the budget must be able to move some day
        most = min(pool.num_free - keep_free, affordable)
        if most <= 0:
            return 0
        avoid = SpanSet()
        for span in self.still_read(completed_step):
            avoid.add(*span)
        targets = iter(self._targets(pool, (pool.first, pool.last), most, from_high, avoid))
        free, spent = pool.num_free, 0
        inward = range(pool.last - 1, pool.first - 1, -1) if from_high else range(pool.first, pool.last)
        for page in inward:
            if free <= keep_free:
                break
            virtual = pool.owner[page]
            if pool.state[page] == PENDING or (pool.state[page] == BOUND and virtual in self.copying[group]):
                continue  # on its way out already
            free -= 1
            if pool.state[page] == FREE:
                continue
            if pool.state[page] != BOUND or not self.movable(group, virtual):
                break
            target = next(targets, page)
            if (target >= page) if from_high else (target <= page):
                break
            if self.may_copy_beside(group, virtual, completed_step):
                self.copy_beside(group, page, target, step)
            else:
                self.move_now(group, page, target)
            spent += pool.page_bytes
        return spent
