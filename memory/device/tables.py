"""The page tables' mirror: virtual to physical page per group, as the ledger's differences leave it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from memory.api import TableUpdate

IntArray = npt.NDArray[np.int64]


class PageTables:
    """Answers physical pages. A group that never had a difference maps every page to itself."""

    def __init__(self) -> None:
        self._physical: dict[str, IntArray] = {}

    def apply(self, updates: Iterable[TableUpdate]) -> None:
        """Enters differences; physical -1 unbinds."""
        for update in updates:
            table = self._with_room(update.group, max(update.virtual, default=-1) + 1)
            table[list(update.virtual)] = update.physical

    def physical(self, group: str, virtual: IntArray) -> IntArray:
        """Physical pages of virtual ones, same shape; -1 stays -1. A virtual page without a physical one raises
        LookupError: the plan names a page that the ledger never bound."""
        table = self._physical.get(group)
        if table is None:
            return virtual
        if virtual.size and int(virtual.max()) >= len(table):
            raise LookupError(f"group {group!r}: virtual page {int(virtual.max())} is bound to nothing")
        found = table[virtual]
        found[virtual < 0] = -1
        unbound = (found < 0) & (virtual >= 0)
        if unbound.any():
            raise LookupError(f"group {group!r}: virtual page {int(virtual[unbound][0])} is bound to nothing")
        return found

    def _with_room(self, group: str, num_pages: int) -> IntArray:
        table = self._physical.get(group)
        if table is None:
            table = np.full(max(num_pages, 1024), -1, dtype=np.int64)
        elif num_pages > len(table):
            table = np.concatenate(
                [table, np.full(max(num_pages - len(table), len(table)), -1, dtype=np.int64)]
            )
        self._physical[group] = table
        return table
