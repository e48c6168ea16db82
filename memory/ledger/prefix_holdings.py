"""Counts which virtual pages a prefix tree holds, in how many of its nodes, and which of them are in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memory.api import LedgerError, PageKind
from memory.ledger.prefix_blocks import Blocks


class Holdings:
    """``held[group][id]``: how many nodes or bundles hold the page; ``locked[group][id]``: how many locked bundles."""

    def __init__(self, blocks: Blocks) -> None:
        self.held: dict[str, dict[int, int]] = {name: {} for name in blocks.rules}
        self.locked: dict[str, dict[int, int]] = {name: {} for name in blocks.bundled}
        self._rules = blocks.rules

    def hold(self, name: str, ids: Sequence[int]) -> list[int]:
        """Answers the pages that nothing held before. LedgerError where a FULL or STATE page is held already."""
        held = self.held[name]
        # Only WINDOW pages may be held twice: bundles less than a window apart share some.
        exclusive = self._rules[name].kind is not PageKind.WINDOW
        kept = []
        for page in ids:
            if page not in held:
                kept.append(page)
            elif exclusive:
                raise LedgerError(f"prefix tree: {name} page {page} is held for other content already")
            held[page] = held.get(page, 0) + 1
        return kept

    def let_go(self, name: str, ids: Sequence[int], gone: list[int]) -> int:
        """Appends to ``gone`` the pages that nothing holds any more and answers their bytes."""
        before = len(gone)
        gone += [page for page in ids if _count(self.held[name], page, -1) == 0]
        return (len(gone) - before) * self._rules[name].page_bytes

    def lock(self, pages: Mapping[str, Sequence[int]], change: int) -> None:
        """A bundle of these pages has become locked (+1) or free (-1)."""
        for name, ids in pages.items():
            for page in ids:
                _count(self.locked[name], page, change)

    def held_bytes(self) -> dict[str, int]:
        """Bytes held, by group."""
        return {name: len(ids) * self._rules[name].page_bytes for name, ids in self.held.items()}

    def evictable_bytes(self) -> dict[str, int]:
        """Bytes in no locked bundle, by STATE and WINDOW group."""
        held = self.held_bytes()
        return {
            name: held[name] - len(ids) * self._rules[name].page_bytes for name, ids in self.locked.items()
        }


def _count(counts: dict[int, int], page: int, change: int) -> int:
    left = counts.get(page, 0) + change
    if left:
        counts[page] = left
    else:
        del counts[page]
    return left
