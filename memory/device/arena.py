"""The arena: one byte buffer on the device, a page grid over all of it per kind, and a strided view per layer row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.pages import zero_pages
from memory.api import PAGE_ALIGN_BYTES, PageKind, PageSpec, StepCommands
from memory.device.host_tier import HostTier
from memory.device.huge_pages import ask_for_huge_pages
from memory.device.lanes import make_lanes
from memory.device.mover import PageMover
from memory.device.tables import DeviceTables, PageTables
from memory.device.watch import ArenaWatch


def page_anchor(spec: PageSpec, arena_bytes: int) -> int:
    """Byte address of page 0 of a kind's grid. FULL's last page ends where the arena does; other grids start at 0."""
    return arena_bytes % spec.page_bytes if spec.kind is PageKind.FULL else 0


class Arena:
    """All changing memory of a worker. Grids overlap: which pages may be used is the ledger's decision alone.

    Attributes:
        buffer: [arena_bytes] uint8.
        grids: by group, [pages, page_bytes] uint8.
        views: by (layer, row name), [pages, page_tokens, *row shape]; without the entry dimension for STATE.
        tables: virtual to physical pages, on the host.
        device_tables: the same on the device.
        host: pages that wait in host memory.
        mover: carries out what a step needs done to pages.
        watch: tests put one here, to have every byte checked.
    """

    def __init__(
        self, specs: Sequence[PageSpec], arena_bytes: int, device: torch.device, host_bytes: int = 0
    ) -> None:
        """Takes ``arena_bytes`` (rounded down to whole 128-byte lines) of ``device``, zeroed, and ``host_bytes`` of
        host memory for the tier behind it."""
        self.num_bytes = arena_bytes // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES
        self.device = device
        self.specs: Mapping[str, PageSpec] = {spec.name: spec for spec in specs}
        self.buffer = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            ask_for_huge_pages(self.buffer)
        self.grids = {spec.name: self._grid(spec) for spec in specs}
        self.views: dict[tuple[int, str], torch.Tensor] = {}
        for spec in specs:
            if spec.kind is not PageKind.EXPERT:
                self.views.update(self._row_views(spec))
        self.tables = PageTables()
        paged = {spec.name: spec for spec in specs if spec.kind is not PageKind.EXPERT}
        self.device_tables = DeviceTables({name: len(self.grids[name]) for name in paged}, device)
        page_bytes = {name: spec.page_bytes for name, spec in paged.items()}
        self.host = HostTier(page_bytes, host_bytes, pinned=device.type == "cuda")
        self.mover = PageMover(self.grids, self.host, self.device_tables, make_lanes(device))
        self.watch: ArenaWatch | None = None

    def _grid(self, spec: PageSpec) -> torch.Tensor:
        anchor = page_anchor(spec, self.num_bytes)
        num_pages = (self.num_bytes - anchor) // spec.page_bytes
        return self.buffer[anchor : anchor + num_pages * spec.page_bytes].view(num_pages, spec.page_bytes)

    def _row_views(self, spec: PageSpec) -> dict[tuple[int, str], torch.Tensor]:
        views = {}
        grid = self.grids[spec.name]
        for block in spec.blocks:
            num_bytes = block.row.num_bytes * spec.page_tokens
            rows = grid[:, block.offset_bytes : block.offset_bytes + num_bytes]
            typed = rows.view(getattr(torch, block.row.dtype))
            entries = () if spec.kind is PageKind.STATE else (spec.page_tokens,)
            views[block.layer, block.row.name] = typed.view(typed.shape[0], *entries, *block.row.shape)
        return views

    def apply(self, commands: StepCommands) -> None:
        """Launches what a step needs done ahead of it, on the current stream and beside it; never waits for the
        device. See :mod:`memory.device.mover`."""
        if self.watch is not None:
            self.watch.before(commands)
        self.mover.carry_out(commands)
        self.tables.apply(commands.table)
        if self.watch is not None:
            self.watch.after(commands)

    def finished(self, step: int) -> int:
        """Of a ``step`` whose tokens are there: the last step up to it that is wholly done, copies beside it included.
        Never waits."""
        return self.mover.finished(step)

    def zero(self, group: str, pages: torch.Tensor) -> None:
        """Zeroes physical ``pages`` [n] int64 of a group."""
        zero_pages(self.grids[group], pages)
