"""The arena: one byte buffer on the device, a page grid over all of it per kind, and a strided view per layer row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.pages import copy_pages, zero_pages
from memory.api import PAGE_ALIGN_BYTES, PageCopy, PageKind, PageSpec, StepCommands
from memory.device.host_tier import HostTier
from memory.device.huge_pages import ask_for_huge_pages
from memory.device.tables import PageTables


def page_anchor(spec: PageSpec, arena_bytes: int) -> int:
    """Byte address of page 0 of a kind's grid. FULL's last page ends where the arena does; other grids start at 0."""
    return arena_bytes % spec.page_bytes if spec.kind is PageKind.FULL else 0


class Arena:
    """All changing memory of a worker. Grids overlap: which pages may be used is the ledger's decision alone.

    Attributes:
        buffer: [arena_bytes] uint8.
        grids: by group, [pages, page_bytes] uint8.
        views: by (layer, row name), [pages, page_tokens, *row shape]; without the entry dimension for STATE.
        tables: virtual to physical pages.
    """

    def __init__(self, specs: Sequence[PageSpec], arena_bytes: int, device: torch.device) -> None:
        """Takes ``arena_bytes`` (rounded down to whole 128-byte lines) of ``device``, zeroed."""
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
        waiting = {spec.name: spec.page_bytes for spec in specs if spec.kind is not PageKind.EXPERT}
        self.host = HostTier(waiting, pinned=device.type == "cuda")

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
        """Carries out what a step needs done ahead of it: moves, copies, then the table differences."""
        moved: dict[str, tuple[list[int], list[int]]] = {}
        for move in commands.moves:
            sources, targets = moved.setdefault(move.group, ([], []))
            sources.append(move.source)
            targets.append(move.target)
        for group, (sources, targets) in moved.items():
            self._copy_pages(group, sources, targets)
        for copy in commands.copies:
            self._copy(copy)
        self.tables.apply(commands.table)

    def zero(self, group: str, pages: torch.Tensor) -> None:
        """Zeroes physical ``pages`` [n] int64 of a group."""
        zero_pages(self.grids[group], pages)

    def _copy(self, copy: PageCopy) -> None:
        grid = self.grids[copy.group]
        if copy.to_host:
            self.host.store(copy.group, copy.target, grid[copy.source])
        elif copy.from_host:
            self.host.load(copy.group, copy.source, grid[copy.target])
        else:
            self._copy_pages(copy.group, [copy.source], [copy.target])

    def _copy_pages(self, group: str, sources: list[int], targets: list[int]) -> None:
        copy_pages(
            self.grids[group],
            torch.tensor(sources, device=self.device),
            torch.tensor(targets, device=self.device),
        )
