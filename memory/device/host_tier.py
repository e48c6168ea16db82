"""Pages that wait in host memory: stored from the arena and loaded back, one slot per page."""

from __future__ import annotations

import torch


class HostTier:
    """Host copies of pages by (group, slot). Slots come into being when first stored to."""

    def __init__(self, pinned: bool) -> None:
        """``pinned``: page-locked memory, for a device that copies by itself."""
        self._pinned = pinned
        self._slots: dict[tuple[str, int], torch.Tensor] = {}

    def store(self, group: str, slot: int, page: torch.Tensor) -> None:
        """Copies ``page`` [page_bytes] uint8 of the arena into a slot, in stream order."""
        held = self._slots.get((group, slot))
        if held is None:
            held = torch.empty(page.shape, dtype=torch.uint8, pin_memory=self._pinned)
            self._slots[group, slot] = held
        held.copy_(page, non_blocking=self._pinned)

    def load(self, group: str, slot: int, page: torch.Tensor) -> None:
        """Copies a slot into ``page`` [page_bytes] uint8 of the arena; KeyError for a slot never stored."""
        page.copy_(self._slots[group, slot], non_blocking=self._pinned)
