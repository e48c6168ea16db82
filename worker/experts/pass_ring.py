"""Streams the experts that a prefill pass lacks through a ring of places, a layer's worth ahead of the computation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from kernels.residency import gather
from memory.api import PlaceRange
from memory.device.residency import Lane, Residency

RING_PROGRAMS = 16
"""That fill a half, 16 KB on its way in each: what a link of 50 GB/s holds in some microseconds. A launch of a program
per piece would have the whole device wait: what comes behind in another stream, be it a pass's layers or a decode step,
begins when the last of its programs has begun, which is when the link has brought nearly everything. And a decode step,
which asks for what it misses by many more programs, has most of the link while it needs it."""


class PassRing:
    """Two halves of a ring: one is read by the layer being computed, the other is filled for the next.

    Which experts are missing is decided on the device when a half is filled. Decode steps between two layers may take
    an expert in or let it go; the tables are looked up again when the layer is computed, and only what the ring holds
    is read from there. What does not fit is read where it is. The ring is banned: no expert owns its places.

    On a GPU halves are filled on a stream of their own: behind the layer that read the half before, beside whatever the
    compute stream does, and a layer waits for its half alone. Blocks come from the host store, never from a place that
    could be let go while it is copied.

    Attributes:
        fill_s: seconds that the link is expected to need for a half.
    """

    def __init__(
        self,
        residency: Residency,
        block_bytes: Sequence[int],
        ring: PlaceRange | None,
        link_bytes_per_s: float = 0.0,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        """``block_bytes`` per row; without a ``ring`` everything missing is read where it is. Begins with the first two
        layers. ``link_bytes_per_s``: 0 where it is not known. ``side``: where a GPU fills halves."""
        self._residency = residency
        self._block_bytes = tuple(block_bytes)
        size = 0 if ring is None else (ring.last - ring.first) // 2
        self.fill_s = size * max(block_bytes) / link_bytes_per_s if link_bytes_per_s else 0.0
        first = 0 if ring is None else ring.first
        self._halves = (range(first, first + size), range(first + size, first + 2 * size))
        device = residency.address.device
        self._held = torch.zeros(2, residency.address.shape[1], dtype=torch.int64, device=device)
        self._side = side
        self._filled: list[torch.cuda.Event | None] = [None, None]
        for row in range(min(2, len(self._block_bytes))):
            self._fill(row)

    def _fill(self, row: int) -> None:
        if not self._halves[row % 2]:
            return
        side = self._side
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(side.device))
        with nullcontext() if side is None else torch.cuda.stream(side):
            self._copy(row)
            if side is not None:
                event = torch.cuda.Event()
                event.record(side)
                self._filled[row % 2] = event

    def _copy(self, row: int) -> None:
        residency, half = self._residency, self._halves[row % 2]
        missing = ~residency.resident[row]
        rank = missing.cumsum(0) - 1
        copied = missing & (rank < len(half))
        targets = torch.where(copied, residency.address_of(half.start + rank), 0)
        gather(residency.host_address[row], targets, self._block_bytes[row], RING_PROGRAMS)
        self._held[row % 2] = targets
        residency.counts[Lane.STAGED, row] += copied.sum()

    def table(self, row: int) -> torch.Tensor:
        """[experts] int64: where the layer's experts are to be read now."""
        filled = self._filled[row % 2]
        if filled is not None:
            torch.cuda.current_stream(self._held.device).wait_event(filled)
        held = self._held[row % 2]
        return torch.where(held > 0, held, self._residency.address[row])

    def count(self, row: int, experts: torch.Tensor) -> None:
        """Enters the layer's chosen ``experts`` [tokens, experts_per_token] into the counters."""
        self._residency.count_prefill(row, experts, self._held[row % 2] > 0)

    def done(self, row: int) -> None:
        """The layer was computed: its half is filled for the layer after the next."""
        if row + 2 < len(self._block_bytes):
            self._fill(row + 2)
