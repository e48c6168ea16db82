"""Pages that wait in host memory: stored from the arena and loaded back, in slots of slabs that all groups share."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class HostTier:
    """The bytes of :class:`memory.ledger.host_tier.HostTier`, whose slots these are: slabs as large as the largest
    page, ``slot // per_slab`` names the slab and ``slot % per_slab`` the place in it. A slab comes into being when
    first stored to and serves whichever group the ledger gives it to, so the bytes here keep to the ledger's budget."""

    def __init__(self, page_bytes: Mapping[str, int], pinned: bool) -> None:
        """``page_bytes`` by group, as the ledger's tier has them; ``pinned``: page-locked memory, for a device that
        copies by itself."""
        self._pinned = pinned
        self._page_bytes = dict(page_bytes)
        self._slab_bytes = max(page_bytes.values(), default=1)
        self._slabs: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the slabs that exist."""
        return len(self._slabs) * self._slab_bytes

    def store(self, group: str, slot: int, page: torch.Tensor) -> None:
        """Copies ``page`` [page_bytes] uint8 of the arena into a slot, in stream order."""
        number, first = self._place(group, slot)
        slab = self._slabs.get(number)
        if slab is None:
            slab = torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._slabs[number] = slab
        slab[first : first + len(page)].copy_(page, non_blocking=self._pinned)

    def load(self, group: str, slot: int, page: torch.Tensor) -> None:
        """Copies a slot into ``page`` [page_bytes] uint8 of the arena; KeyError for a slab never stored to."""
        number, first = self._place(group, slot)
        page.copy_(self._slabs[number][first : first + len(page)], non_blocking=self._pinned)

    def _place(self, group: str, slot: int) -> tuple[int, int]:
        """The slab of a slot, and the slot's first byte in it."""
        size = self._page_bytes[group]
        slab, index = divmod(slot, self._slab_bytes // size)
        return slab, index * size
