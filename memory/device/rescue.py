"""Carries the hottest experts that a ban dropped over to the coldest usable places, within a budget of bytes a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels.pages import copy_pages
from memory.device.residency import FREE, Residency

RESCUE_BYTES = 256 << 20
"""Of a step: 0.12 ms of an H200's memory bandwidth."""


class Rescuer:
    """Carries out a step's command blocks: all bans first, whatever they drop, then the rescue.

    It runs on the compute stream ahead of the step's own moves and kernels, so the bytes of the banned places are still
    those of their experts. Fixed shapes, no look at a value by the host on a GPU.
    """

    def __init__(self, residency: Residency, grid: torch.Tensor, budget_bytes: int = RESCUE_BYTES) -> None:
        """``grid`` [places, place_bytes] uint8; ``budget_bytes`` 0: nothing is rescued."""
        self._residency = residency
        self._grid = grid
        self._most = min(budget_bytes // grid.stride(0), residency.num_places) if len(grid) else 0

    def apply(self, blocks: Iterable[torch.Tensor]) -> None:
        """Command blocks (``memory.device.commands``) on the device."""
        dropped: torch.Tensor | None = None
        for block in blocks:
            lost = self._residency.apply(block)
            dropped = lost if dropped is None else torch.maximum(dropped, lost)
        if dropped is not None and self._most:
            self._rescue(dropped)

    def _rescue(self, dropped: torch.Tensor) -> None:
        """``dropped`` [places] int64: the expert whose bytes a place still holds, FREE where none. The n-th hottest
        goes over the n-th coldest where it is worth more."""
        residency, none = self._residency, self._residency.num_places
        heat = torch.where(dropped >= 0, residency.worth(dropped), -torch.inf)
        hot, source = torch.topk(heat, self._most)
        cold, target = torch.topk(residency.coldness(), self._most, largest=False)
        taken = (hot > cold) & torch.isfinite(hot)
        owners = torch.where(taken, dropped[source], FREE)
        places = torch.where(taken, target, none)
        residency.vacate(places)
        if self._grid.is_cuda:
            copy_pages(self._grid, torch.where(taken, source, -1), torch.where(taken, target, -1))
        else:
            copy_pages(self._grid, source[taken], target[taken])
        residency.settle(places, owners)
