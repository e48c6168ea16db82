"""Compares resident places with the hashes of their blocks, a few a step, in the order of the stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.hashing import check_next, hash_blocks
from memory.device.residency import Residency


class ResidencyCheck:
    """Walks over the places. Kernels of one stream see one state, so no place changes while it is read; a checker
    beside the stream would have to compare ``generation`` before and after.

    Attributes:
        found: [3] int64 on the device: number of mismatches, then row and expert of the first one.
        num_checked: places whose turn it was so far.
    """

    def __init__(
        self,
        residency: Residency,
        grid: torch.Tensor,
        hashes: torch.Tensor,
        block_bytes: Sequence[int],
        places_per_step: int = 1,
    ) -> None:
        """``grid`` [places, place_bytes] uint8; ``hashes`` [rows, experts] int64 on its device; ``block_bytes`` per
        row."""
        self._residency = residency
        self._grid = grid
        self._hashes = hashes
        self._sizes = sorted(set(block_bytes))
        self._size_of_row = torch.tensor(list(block_bytes), device=grid.device)
        self._places_per_step = min(places_per_step, residency.num_places)
        self._next = torch.zeros((), dtype=torch.int64, device=grid.device)
        self._steps = torch.arange(self._places_per_step, device=grid.device)
        self.num_checked = 0
        self._progress = torch.zeros(2, dtype=torch.int64, device=grid.device)
        self.found = torch.zeros(3, dtype=torch.int64, device=grid.device)

    def step(self) -> None:
        """Checks the next places."""
        if self._places_per_step == 0:
            return
        self.num_checked += self._places_per_step
        # On the device: the host neither waits nor sends anything.
        if self._grid.is_cuda:
            self.step_fused()
            return
        places = (self._next + self._steps) % self._residency.num_places
        self._next.copy_((self._next + self._places_per_step) % self._residency.num_places)
        self.check(places)

    def step_fused(self) -> None:
        """The same, a launch per place."""
        for _ in range(self._places_per_step):
            check_next(
                self._grid,
                self._residency.owner,
                self._hashes,
                self._size_of_row,
                self._next,
                self._progress,
                self.found,
            )

    def check(self, places: torch.Tensor) -> None:
        """Checks ``places`` [n] int64; free and banned ones are right whatever they hold."""
        owner = self._residency.owner[places]
        held = owner >= 0
        experts = self._hashes.shape[1]
        row, expert = owner.clamp_min(0) // experts, owner.clamp_min(0) % experts
        size = self._size_of_row[row]
        wrong = torch.zeros_like(held)
        for num_bytes in self._sizes:
            found = hash_blocks(self._grid[places, :num_bytes])
            wrong |= (size == num_bytes) & (found != self._hashes[row, expert])
        wrong &= held
        first = torch.argmax(wrong.to(torch.int64))
        report = torch.stack([wrong.sum(), row[first], expert[first]])
        kept = self.found.clone()
        fresh = torch.where((kept[0] == 0) & wrong.any(), report, kept)
        fresh[0] = kept[0] + report[0]
        self.found.copy_(fresh)
