"""Maps the virtual pages of one group to physical ones and counts who holds them; tells what changed for the device."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import LedgerError, TableUpdate

MUTABLE = -1


class PageTable:
    """The virtual side of one group.

    A virtual page is held by requests and queued copies (``users``), by the prefix tree (``cached``) and by pins. When
    the last lets go it has no page any more. ``last_step`` is the last step that may read its bytes; ``sealed`` the
    step whose planning found the page fully written (all writers are earlier steps), or :data:`MUTABLE`.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self.physical: list[int] = []
        self.holders: list[int] = []
        """users, tree and pins together: 1 where one request alone holds a page"""
        self.users: list[int] = []
        self.cached: list[bool] = []
        self.pins: list[int] = []
        self.last_step: list[int] = []
        self.sealed: list[int] = []
        self.num_cached_only = 0
        self.num_pinned = 0
        self._free: list[int] = []
        self._changed: dict[int, None] = {}

    @property
    def num_bound(self) -> int:
        """Virtual pages that exist."""
        return len(self.physical) - len(self._free)

    def new(self) -> int:
        """A fresh virtual page with one user and no physical page yet."""
        if self._free:
            virtual = self._free.pop()
            self.users[virtual] = self.holders[virtual] = 1
            self.last_step[virtual] = -1
            self.sealed[virtual] = MUTABLE
            return virtual
        self.physical.append(-1)
        self.holders.append(1)
        self.users.append(1)
        self.cached.append(False)
        self.pins.append(0)
        self.last_step.append(-1)
        self.sealed.append(MUTABLE)
        return len(self.physical) - 1

    def bind(self, virtual: int, physical: int) -> None:
        """Points a virtual page at a physical one."""
        self.physical[virtual] = physical
        self._changed[virtual] = None

    def hold(self, virtual: int) -> None:
        """One user more."""
        self._known(virtual)
        if self.users[virtual] == 0 and self.pins[virtual] == 0:
            self.num_cached_only -= 1
        self.users[virtual] += 1
        self.holders[virtual] += 1

    def drop(self, virtual: int, last_step: int) -> bool:
        """One user less; steps up to ``last_step`` may still read for it. True: nobody holds the page any more."""
        if self.users[virtual] <= 0:
            raise LedgerError(f"{self.group}: virtual page {virtual} is released twice")
        self.users[virtual] -= 1
        self.holders[virtual] -= 1
        if last_step > self.last_step[virtual]:
            self.last_step[virtual] = last_step
        if self.users[virtual]:
            return False
        return self._maybe_unheld(virtual)

    def keep(self, virtual: int) -> None:
        """The prefix tree holds the page from now on."""
        self._known(virtual)
        if self.cached[virtual]:
            raise LedgerError(f"{self.group}: the tree already holds virtual page {virtual}")
        self.cached[virtual] = True
        self.holders[virtual] += 1

    def forget(self, virtual: int) -> bool:
        """The prefix tree lets the page go. True: nobody holds it any more."""
        if not self.cached[virtual]:
            raise LedgerError(f"{self.group}: the tree does not hold virtual page {virtual}")
        self.cached[virtual] = False
        self.holders[virtual] -= 1
        if self.holders[virtual]:
            return False
        self.num_cached_only -= 1
        return True

    def pin(self, virtual: int) -> None:
        """Something outside the steps reads the page: it neither moves nor frees. Pins nest."""
        self._known(virtual)
        if self.pins[virtual] == 0:
            self.num_pinned += 1
            if self.users[virtual] == 0:
                self.num_cached_only -= 1
        self.pins[virtual] += 1
        self.holders[virtual] += 1

    def unpin(self, virtual: int) -> bool:
        """Ends one pin. True: nobody holds the page any more."""
        if self.pins[virtual] <= 0:
            raise LedgerError(f"{self.group}: virtual page {virtual} is not pinned")
        self.pins[virtual] -= 1
        self.holders[virtual] -= 1
        if self.pins[virtual]:
            return False
        self.num_pinned -= 1
        if self.users[virtual]:
            return False
        return self._maybe_unheld(virtual)

    def unbind(self, virtual: int) -> int:
        """Ends a virtual page that nobody holds and answers its physical page."""
        physical = self.physical[virtual]
        self.physical[virtual] = -1
        self._changed[virtual] = None
        self._free.append(virtual)
        return physical

    def difference(self) -> TableUpdate | None:
        """What changed since the last call."""
        if not self._changed:
            return None
        virtual = tuple(self._changed)
        self._changed.clear()
        return TableUpdate(self.group, virtual, tuple([self.physical[page] for page in virtual]))

    def count_alone(self, virtuals: Sequence[int]) -> int:
        """How many of a request's pages nobody else holds."""
        return list(map(self.holders.__getitem__, virtuals)).count(1)

    def _maybe_unheld(self, virtual: int) -> bool:
        if self.pins[virtual]:
            return False
        if self.cached[virtual]:
            self.num_cached_only += 1
            return False
        return True

    def _known(self, virtual: int) -> None:
        if not 0 <= virtual < len(self.physical) or self.physical[virtual] < 0:
            raise LedgerError(f"{self.group}: there is no virtual page {virtual}")
