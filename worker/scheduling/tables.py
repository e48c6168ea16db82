"""The page tables of the running requests as arrays of virtual ids, kept up to date grant by grant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from memory.api import Grant, Ledger, PageKind, PageSpec
from worker.scheduling.step import GroupTables, IntArray


class _GroupRows:
    """One group's rows: ``pages[slot, j]`` is logical page ``first[slot] + j``, -1 behind the last."""

    def __init__(self, name: str, kind: PageKind, max_running: int) -> None:
        self.name, self.kind = name, kind
        self.pages: IntArray = np.full((max_running, 8), -1, dtype=np.int64)
        self.first: IntArray = np.zeros(max_running, dtype=np.int64)
        self.count: IntArray = np.zeros(max_running, dtype=np.int64)

    def _fit(self, width: int) -> None:
        have = self.pages.shape[1]
        if width > have:
            wider = np.full((len(self.pages), max(width, 2 * have)), -1, dtype=np.int64)
            wider[:, :have] = self.pages
            self.pages = wider

    def append(self, slot: int, first: int, pages: tuple[int, ...]) -> None:
        start = first - int(self.first[slot])
        if start != self.count[slot]:
            raise RuntimeError(f"pages of {self.name!r} were granted from {first} on, not behind the last")
        self._fit(start + len(pages))
        self.pages[slot, start : start + len(pages)] = pages
        self.count[slot] += len(pages)

    def replace(self, slot: int, first: int, pages: Iterable[int]) -> None:
        held = tuple(pages)
        self._fit(len(held))
        self.pages[slot, len(held) : int(self.count[slot])] = -1
        self.pages[slot, : len(held)] = held
        self.first[slot], self.count[slot] = first, len(held)

    def gather(self, slots: IntArray) -> GroupTables:
        width = max(1, int(self.count[slots].max(initial=1)))
        return GroupTables(self.pages[slots, :width], self.first[slots])


class PageTables:
    """All groups' rows. EXPERT places have no rows: no request owns them."""

    def __init__(self, specs: Mapping[str, PageSpec], max_running: int) -> None:
        self._groups = {
            name: _GroupRows(name, spec.kind, max_running)
            for name, spec in specs.items()
            if spec.kind is not PageKind.EXPERT
        }

    def start(self, slot: int, request: int, ledger: Ledger) -> None:
        """A request took a slot: reads all its pages, shared ones included."""
        for name, rows in self._groups.items():
            run = ledger.pages(request, name)
            rows.replace(slot, run.first, run.pages)

    def extend(self, slot: int, request: int, grant: Grant, ledger: Ledger) -> None:
        """Takes a later grant in. Window pages may have been let go with it, so that group is read anew."""
        for growth in grant.growth:
            rows = self._groups[growth.group]
            if rows.kind is PageKind.FULL:
                rows.append(slot, growth.first, growth.pages)
        self.refresh(slot, request, ledger, PageKind.WINDOW)

    def refresh(self, slot: int, request: int, ledger: Ledger, kind: PageKind) -> None:
        """Reads the pages of the groups of one kind anew."""
        for name, rows in self._groups.items():
            if rows.kind is kind:
                run = ledger.pages(request, name)
                rows.replace(slot, run.first, run.pages)

    def stop(self, slot: int) -> None:
        """The slot is empty."""
        for rows in self._groups.values():
            rows.replace(slot, 0, ())

    def gather(self, slots: IntArray) -> dict[str, GroupTables]:
        """Copies for a plan: later grants do not reach into a step in flight."""
        return {name: rows.gather(slots) for name, rows in self._groups.items()}
