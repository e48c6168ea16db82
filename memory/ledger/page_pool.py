"""Keeps the physical pages of one group: which lie in its extent, which are free, and which virtual page owns each."""

from __future__ import annotations

from array import array
from enum import Enum
from heapq import heapify, heappop, heappush

from memory.api import LedgerError, PageKind, PageSpec
from memory.ledger.specs import Grid

ABSENT, FREE, BOUND, PENDING, TARGET = range(5)
"""What a physical page is: outside the extent; in it and free; owned by a virtual page; logically free but still read;
the target of a copy that has not flipped yet."""

_FREE_BYTE = bytes([FREE])
_STALE_SLACK = 1024


class Anchor(Enum):
    """Where a group's extent is held: at the arena's low end, at its high end, or floating between."""

    LOW = "low"
    HIGH = "high"
    FLOAT = "float"


class PagePool:
    """The physical side of one group. ``[first, last)`` are the ids in its extent; all others are ABSENT.

    Free pages are handed out outermost first (lowest id; highest for the group at the high end), so that holes
    gather at the frontier and the band can retreat.
    """

    def __init__(self, spec: PageSpec, arena_bytes: int, anchor: Anchor) -> None:
        self.spec = spec
        self.anchor = anchor
        self.page_bytes = spec.page_bytes
        self.grid = Grid.over(arena_bytes, self.page_bytes, ends_at_end=spec.kind is PageKind.FULL)
        self.first = self.last = self.grid.num_pages if anchor is Anchor.HIGH else 0
        self.state = bytearray(self.grid.num_pages)
        self.owner = array("q", [-1]) * self.grid.num_pages
        self.num_free = 0
        self.num_pending = 0
        self._sign = -1 if anchor is Anchor.HIGH else 1
        self._heap: list[int] = []  # of sign * id; may hold stale ids, so a popped id counts only while FREE

    @property
    def num_pages(self) -> int:
        """Pages in the extent."""
        return self.last - self.first

    @property
    def low_byte(self) -> int:
        """First byte of the extent."""
        return self.grid.address(self.first)

    @property
    def high_byte(self) -> int:
        """First byte behind the extent."""
        return self.grid.address(self.last)

    # -- pages ---------------------------------------------------------------------------------------------------

    def take(self, virtual: int) -> int:
        """Binds the outermost free page to ``virtual`` and answers it; the caller has checked ``num_free``."""
        heap, state, sign = self._heap, self.state, self._sign
        while heap:
            page = heappop(heap) * sign
            if state[page] == FREE:
                state[page] = BOUND
                self.owner[page] = virtual
                self.num_free -= 1
                return page
        raise LedgerError(f"{self.spec.name}: no free page, {self.num_free} counted")

    def take_at(self, page: int, state: int, virtual: int) -> None:
        """Takes one particular free page as the target of a move (TARGET), or binds it at once (BOUND)."""
        if self.state[page] != FREE:
            raise LedgerError(f"{self.spec.name}: page {page} is not free to be moved to")
        self.state[page] = state
        self.owner[page] = virtual
        self.num_free -= 1

    def settle(self, page: int) -> None:
        """A move's target becomes its owner's page."""
        if self.state[page] != TARGET:
            raise LedgerError(f"{self.spec.name}: page {page} is no move's target")
        self.state[page] = BOUND

    def defer(self, page: int) -> None:
        """A page loses its owner but is still read: its bytes wait."""
        if self.state[page] not in (BOUND, TARGET):
            raise LedgerError(f"{self.spec.name}: page {page} is freed twice")
        self.state[page] = PENDING
        self.owner[page] = -1
        self.num_pending += 1

    def free(self, page: int) -> None:
        """A page's bytes may be used again."""
        before = self.state[page]
        if before == PENDING:
            self.num_pending -= 1
        elif before not in (BOUND, TARGET):
            raise LedgerError(f"{self.spec.name}: page {page} is freed twice")
        self.state[page] = FREE
        self.owner[page] = -1
        self.num_free += 1
        heappush(self._heap, page * self._sign)

    def find_free(self, low: int, high: int, *, from_low: bool) -> int:
        """A free page in ``[low, high)``, nearest to that end; -1 if there is none."""
        search = self.state.find if from_low else self.state.rfind
        return search(_FREE_BYTE, max(low, self.first), min(high, self.last))

    # -- extent --------------------------------------------------------------------------------------------------

    def place_at(self, page: int) -> None:
        """Sets where an empty extent begins."""
        if self.num_pages:
            raise LedgerError(f"{self.spec.name}: an extent with pages cannot be placed anew")
        self.first = self.last = page

    def grow_up(self, num_pages: int) -> None:
        """Adds pages above the extent."""
        self._appear(self.last, self.last + num_pages)
        self.last += num_pages

    def grow_down(self, num_pages: int) -> None:
        """Adds pages below the extent."""
        self._appear(self.first - num_pages, self.first)
        self.first -= num_pages

    def shrink_high(self, num_pages: int) -> None:
        """Gives up free pages at the high edge."""
        self._vanish(self.last - num_pages, self.last)
        self.last -= num_pages

    def shrink_low(self, num_pages: int) -> None:
        """Gives up free pages at the low edge."""
        self._vanish(self.first, self.first + num_pages)
        self.first += num_pages

    def free_at_high(self) -> int:
        """Free pages in a row at the high edge."""
        return self.num_pages - len(self.state[self.first : self.last].rstrip(_FREE_BYTE))

    def free_at_low(self) -> int:
        """Free pages in a row at the low edge."""
        return self.num_pages - len(self.state[self.first : self.last].lstrip(_FREE_BYTE))

    def _appear(self, low: int, high: int) -> None:
        if low < 0 or high > self.grid.num_pages:
            raise LedgerError(f"{self.spec.name}: the extent would leave the arena")
        self.state[low:high] = _FREE_BYTE * (high - low)
        self.num_free += high - low
        fresh = [page * self._sign for page in range(low, high)]
        if len(self._heap) > 2 * self.num_free + _STALE_SLACK:
            pages = range(self.first, self.last)
            self._heap = [page * self._sign for page in pages if self.state[page] == FREE]
        if len(fresh) > len(self._heap):
            self._heap += fresh
            heapify(self._heap)
        else:
            for key in fresh:
                heappush(self._heap, key)

    def _vanish(self, low: int, high: int) -> None:
        if self.state.count(_FREE_BYTE, low, high) != high - low:
            raise LedgerError(f"{self.spec.name}: the extent would give up pages in use")
        self.state[low:high] = bytes(high - low)
        self.num_free -= high - low
