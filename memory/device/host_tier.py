"""Pages that wait in host memory: stored from the arena and loaded back, in slots of slabs that all groups share."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping

import torch

from memory.device.host_region import HostRegion, pin, unpin

log = logging.getLogger(__name__)


class HostTier:
    """The bytes of :class:`memory.ledger.host_tier.HostTier`, whose slots these are: slabs as large as the largest
    page, ``slot // per_slab`` names the slab and ``slot % per_slab`` the place in it. One region of exactly the
    ledger's size, page-locked for a device that copies by itself.

    Attributes:
        pinned: whether the device may copy while the host goes on.
    """

    def __init__(self, page_bytes: Mapping[str, int], budget_bytes: int, pinned: bool) -> None:
        """``page_bytes`` by group and ``budget_bytes`` as the ledger's tier has them. Where the driver refuses to pin,
        that is said, and copies go through unpinned memory, which the host waits for."""
        self._page_bytes = dict(page_bytes)
        self._slab_bytes = max(page_bytes.values(), default=1)
        self.num_bytes = budget_bytes // self._slab_bytes * self._slab_bytes
        region = HostRegion(self.num_bytes)
        self._data = region.data
        self.pinned = False
        if pinned and self.num_bytes:
            started_s = time.perf_counter()
            problem = pin(self._data)
            self.pinned = problem is None
            if problem is None:
                seconds = time.perf_counter() - started_s
                log.info("pinned %.2f GB for the host tier in %.1f s", self.num_bytes / 1e9, seconds)
                # Unpinned before the mapping goes, or its addresses could not be pinned again.
                weakref.finalize(self, unpin, self._data)
            else:
                log.warning("host_tier_bytes: %s; pages are copied through unpinned memory, slowly", problem)

    def page(self, group: str, slot: int) -> torch.Tensor:
        """[page_bytes] uint8, the slot's memory. LookupError for a slot beyond the budget."""
        size = self._page_bytes[group]
        slab, index = divmod(slot, self._slab_bytes // size)
        first = slab * self._slab_bytes + index * size
        if not 0 <= first <= self.num_bytes - size:
            raise LookupError(
                f"host tier: {group} slot {slot} lies beyond the {self.num_bytes} bytes of the budget"
            )
        return self._data[first : first + size]

    def store(self, group: str, slot: int, page: torch.Tensor) -> None:
        """Copies ``page`` [page_bytes] uint8 of the arena into a slot, in stream order."""
        self.page(group, slot).copy_(page, non_blocking=self.pinned)

    def load(self, group: str, slot: int, page: torch.Tensor) -> None:
        """Copies a slot into ``page`` [page_bytes] uint8 of the arena, in stream order."""
        page.copy_(self.page(group, slot), non_blocking=self.pinned)
