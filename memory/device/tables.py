"""The page tables' mirrors: virtual to physical page per group, as the ledger's differences leave it, on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from memory.api import TableUpdate

IntArray = npt.NDArray[np.int64]


class PageTables:
    """The host's mirror, for planning. A group that never had a difference maps every page to itself."""

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

    def bound(self, group: str) -> tuple[IntArray, IntArray]:
        """Every bound virtual page of a group, ascending, and its physical page."""
        table = self._physical.get(group)
        if table is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        virtual = np.flatnonzero(table >= 0)
        return virtual, table[virtual]

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


class DeviceTables:
    """The device's mirror: at one address for the arena's life, so that captured kernels may look pages up in it.

    Every bound virtual page has a physical one, and a ledger uses its free ids again, so that a group has no more
    virtual pages than its grid has pages.
    """

    def __init__(self, num_pages: Mapping[str, int], device: torch.device) -> None:
        """``num_pages`` of each group's grid. All pages begin unbound."""
        self._span: dict[str, tuple[int, int]] = {}
        first = 0
        for group, count in num_pages.items():
            self._span[group] = (first, first + count)
            first += count
        self._flat = torch.full((first,), -1, dtype=torch.int64, device=device)

    def of(self, group: str) -> torch.Tensor:
        """[pages] int64 by virtual page: its physical page, -1 where unbound."""
        first, last = self._span[group]
        return self._flat[first:last]

    def encode(self, updates: Iterable[TableUpdate]) -> tuple[IntArray, IntArray]:
        """Differences of all groups as one list: where in the mirror, and what. LookupError for a virtual page beyond
        the group's."""
        where: list[int] = []
        what: list[int] = []
        for update in updates:
            first, last = self._span[update.group]
            if update.virtual and max(update.virtual) >= last - first:
                raise LookupError(f"group {update.group!r} has no virtual page {max(update.virtual)}")
            where += [first + page for page in update.virtual]
            what += update.physical
        return np.array(where, dtype=np.int64), np.array(what, dtype=np.int64)

    def patch(self, where: torch.Tensor, what: torch.Tensor) -> None:
        """Enters what :meth:`encode` answered, in the order of the current stream."""
        self._flat.index_copy_(0, where, what)

    def physical(self, group: str, virtual: torch.Tensor) -> torch.Tensor:
        """Physical pages of virtual ones, same shape, int64; -1 stays -1 and an unbound page becomes it."""
        found = self.of(group)[virtual.clamp_min(0)]
        return torch.where(virtual < 0, -1, found)
