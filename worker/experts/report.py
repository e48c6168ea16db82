"""Reads what the device counted about experts, without making it wait, and states it for routers and people."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memory.device.residency import Lane
from worker.api import ExpertResidency
from worker.experts.pager import ExpertPager

OVER_THE_LINK = (Lane.TEE, Lane.IN_PLACE, Lane.PREFILL_IN_PLACE, Lane.STAGED)
POLL_S = 0.02
"""A GPU's counters are copied at most so often."""


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """Experts of one worker at one moment; counters grow for a worker's life.

    ``counts`` has, per layer with experts, the distinct experts of its steps by ``memory.device.residency.Lane``.
    Bytes are blocks: ``bytes_paged`` were stored into places, ``bytes_in_place`` read from host memory and not kept.
    ``num_ghosts`` experts lost their place lately and have none again; ``ghost_hits`` misses were of such.
    ``link_bytes_per_s``: at which missing experts come here, 0 where that is not known. ``num_checked``: places that
    the self-check compared with their expert's hash.
    """

    layers: tuple[int, ...]
    num_experts: int
    resident: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    block_bytes: tuple[int, ...]
    num_places: int
    frozen: bool
    ghost_hits: int
    num_ghosts: int
    residency: ExpertResidency
    link_bytes_per_s: float = 0.0
    num_checked: int = 0

    def stall_s(self, row: int) -> float:
        """Seconds for which a layer's decode steps kept the link busy: what they waited for missing experts, but for
        what they computed meanwhile."""
        if not self.link_bytes_per_s:
            return 0.0
        missed = self.counts[Lane.TEE][row] + self.counts[Lane.IN_PLACE][row]
        return missed * self.block_bytes[row] / self.link_bytes_per_s

    @property
    def total_stall_s(self) -> float:
        """The same over all layers."""
        return sum(self.stall_s(row) for row in range(len(self.layers)))

    def total(self, lane: Lane) -> int:
        """One lane over all layers."""
        return sum(self.counts[lane])

    def lane_bytes(self, *lanes: Lane) -> int:
        """Bytes of the blocks in these lanes."""
        return sum(
            count * size
            for lane in lanes
            for count, size in zip(self.counts[lane], self.block_bytes, strict=True)
        )

    @property
    def hits(self) -> int:
        """Experts of decode steps that were resident."""
        return self.total(Lane.HIT)

    @property
    def misses(self) -> int:
        """Experts of decode steps that were not."""
        return self.total(Lane.TEE) + self.total(Lane.IN_PLACE)

    def as_json(self) -> dict[str, Any]:
        """What ``GET /experts`` answers."""
        looked = self.hits + self.misses
        return {
            "places": self.num_places,
            "place_bytes": max(self.block_bytes),
            "frozen": self.frozen,
            "hit_rate": self.hits / looked if looked else None,
            "bytes_paged": self.lane_bytes(Lane.TEE),
            "bytes_in_place": self.lane_bytes(Lane.IN_PLACE, Lane.PREFILL_IN_PLACE),
            "evictions": self.total(Lane.EVICTED),
            "stall_s": self.total_stall_s,
            "layers": [
                {
                    "layer": layer,
                    "experts": self.num_experts,
                    "resident": self.resident[row],
                    "stall_s": self.stall_s(row),
                    **{lane.name.lower(): self.counts[lane][row] for lane in Lane},
                }
                for row, layer in enumerate(self.layers)
            ],
        }

    def extra(self) -> dict[str, float]:
        """Figures for ``WorkerSnapshot.extra``."""
        return {
            "expert_bytes": float(max(self.block_bytes)),
            "expert_places": float(self.num_places),
            "experts_resident": float(sum(self.resident)),
            "experts_frozen": float(self.frozen),
            "expert_stall_s": self.total_stall_s,
            "expert_evictions": float(self.total(Lane.EVICTED)),
            "expert_ghost_hits": float(self.ghost_hits),
            "expert_ghosts": float(self.num_ghosts),
            "experts_rescued": float(self.total(Lane.RESCUED)),
            "expert_misses_in_place": float(self.total(Lane.IN_PLACE)),
            "expert_prefill_hits": float(self.total(Lane.PREFILL_HIT)),
            "expert_prefill_misses": float(self.total(Lane.PREFILL_IN_PLACE)),
            "expert_staged": float(self.total(Lane.STAGED)),
            "expert_places_checked": float(self.num_checked),
            **{f"expert_bytes.{lane.name.lower()}": float(self.lane_bytes(lane)) for lane in OVER_THE_LINK},
        }


class ExpertReporter:
    """Belongs to the loop's thread. On a GPU it answers with what the copy before has brought, at most
    :data:`POLL_S` and a step old."""

    def __init__(self, pager: ExpertPager) -> None:
        self._pager = pager
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._asked_s = 0.0
        self._generation = 0
        self._last: ExpertReport | None = None

    def read(self) -> ExpertReport:
        """The latest report."""
        if self._pager.residency.counts.is_cuda:
            return self._read_behind()
        return self._make(self._gather())

    def _gather(self) -> torch.Tensor:
        """[lanes * rows + rows * experts + 3] int64: counters, residency, ghosts' hits and number, frozen."""
        tables = self._pager.residency
        ghosts = torch.stack([tables.ghosts.hits.sum(), tables.ghosts.num, tables.frozen.long()])
        return torch.cat([tables.counts.flatten(), tables.resident.flatten().long(), ghosts])

    def _read_behind(self) -> ExpertReport:
        if self._pending is not None and self._pending[1].query():
            self._last = self._make(self._pending[0])
            self._pending = None
        now = time.monotonic()
        if self._pending is None and now - self._asked_s >= POLL_S:
            gathered = self._gather()
            copy = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            copy.copy_(gathered, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending, self._asked_s = (copy, event), now
        return self._last or self._make(torch.zeros_like(self._gather(), device="cpu"))

    def _make(self, gathered: torch.Tensor) -> ExpertReport:
        host = self._pager.host
        rows, experts = len(host.layers), host.num_experts
        values = gathered.numpy()
        counts = values[: len(Lane) * rows].reshape(len(Lane), rows)
        resident = values[len(Lane) * rows : -3].reshape(rows, experts).astype(bool)
        ghost_hits, num_ghosts, frozen = (int(value) for value in values[-3:])
        bits = np.packbits(resident.flatten(), bitorder="little").tobytes()
        if self._last is None or bits != self._last.residency.bits:
            self._generation += 1
        self._last = ExpertReport(
            layers=host.layers,
            num_experts=experts,
            resident=tuple(int(n) for n in resident.sum(1)),
            counts=tuple(tuple(int(n) for n in lane) for lane in counts),
            block_bytes=host.block_bytes,
            num_places=self._pager.num_places,
            frozen=bool(frozen),
            ghost_hits=ghost_hits,
            num_ghosts=num_ghosts,
            residency=ExpertResidency(rows, experts, self._generation, bits),
            num_checked=self._pager.num_checked,
            link_bytes_per_s=self._pager.link.bytes_per_s if self._pager.link is not None else 0.0,
        )
        return self._last
