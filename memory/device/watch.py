"""For tests: fills freed bytes with NaN, and compares the hash of every page that is moved or copied with its source.

What a wrong order or a wrong table does to bytes shows at once and by name, instead of in a token later on. It makes
the host wait for the device at each step that touches pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from kernels.hashing import hash_blocks
from memory.api import Move, PageCopy, PageKind, PageSpec, StepCommands
from memory.device.mover import PageMover
from memory.device.tables import DeviceTables, PageTables

POISON = 0xFF
"""Every float format here reads bytes of all ones as NaN; as int64 they are -1."""
Span = tuple[int, int]
Page = tuple[str, int]


class ArenaCorrupt(RuntimeError):
    """A page does not hold what it should."""


class WatchedArena(Protocol):
    """What the watch looks at."""

    buffer: torch.Tensor
    grids: dict[str, torch.Tensor]
    specs: Mapping[str, PageSpec]
    tables: PageTables
    device_tables: DeviceTables
    mover: PageMover


class ArenaWatch:
    """Put into ``Arena.watch`` before the first step."""

    def __init__(self, arena: WatchedArena) -> None:
        """Poisons the whole arena."""
        self._arena = arena
        self._groups = [name for name, spec in arena.specs.items() if spec.kind is not PageKind.EXPERT]
        self._moving: dict[Page, tuple[Move, int]] = {}  # sealed pages under way, by virtual page; their hash
        self._waiting: dict[Page, int] = {}  # hashes of pages in the host tier, by slot
        self._bound: dict[str, dict[int, int]] = {name: {} for name in self._groups}
        self._freed: list[Span] = []
        self._usable: set[int] = set()
        self.num_moves = self.num_copies = self.num_poisoned = 0
        arena.buffer.fill_(POISON)

    # -- around a step's commands --------------------------------------------------------------------------------

    def before(self, commands: StepCommands) -> None:
        """Bytes that the step before freed are poisoned, since no step still to come may read them; then the moves'
        sources are hashed."""
        self._arena.mover.join()
        for places in commands.ban:
            self._usable -= set(range(places.first, places.last))
        for places in commands.allow:
            self._usable |= set(range(places.first, places.last))
        self._poison()
        self._settle(commands)
        self._hashes = {move: self._hash(move.group, move.source) for move in commands.moves}

    def after(self, commands: StepCommands) -> None:
        """The step's copies are compared, once all have run."""
        self._arena.mover.join()
        for move, content in self._hashes.items():
            self.num_moves += 1
            if move.sealed:
                self._moving[move.group, move.virtual] = (move, content)
            elif self._hash(move.group, move.target) != content:
                raise ArenaCorrupt(f"step {commands.step}: {move} brought other bytes")
        later = {(copy.group, copy.target) for copy in commands.copies if not copy.to_host}
        for copy in commands.copies:
            self._check_copy(commands.step, copy, later)
        self._enter(commands)
        self._compare_tables(commands.step)

    def _check_copy(self, step: int, copy: PageCopy, written: set[Page]) -> None:
        self.num_copies += 1
        if copy.to_host:
            self._waiting[copy.group, copy.target] = self._hash(copy.group, copy.source)
        elif copy.from_host:
            if self._hash(copy.group, copy.target) != self._waiting.get((copy.group, copy.source)):
                raise ArenaCorrupt(f"step {step}: {copy} brought back other bytes than were stored")
        elif (copy.group, copy.source) not in written and (
            self._hash(copy.group, copy.source) != self._hash(copy.group, copy.target)
        ):
            raise ArenaCorrupt(f"step {step}: {copy} brought other bytes")

    def _settle(self, commands: StepCommands) -> None:
        """Sealed pages whose table entry changes now: neither side may have changed since the copy began."""
        for update in commands.table:
            for virtual, physical in zip(update.virtual, update.physical, strict=True):
                move, content = self._moving.pop((update.group, virtual), (None, 0))
                if move is None or physical != move.target:
                    continue
                for page in (move.source, move.target):
                    if self._hash(update.group, page) != content:
                        raise ArenaCorrupt(f"step {commands.step}: page {page} changed while {move} ran")

    def _enter(self, commands: StepCommands) -> None:
        for update in commands.table:
            bound = self._bound[update.group]
            for virtual, physical in zip(update.virtual, update.physical, strict=True):
                old = bound.pop(virtual, -1)
                if old >= 0:
                    self._freed.append(self._span(update.group, old))
                if physical >= 0:
                    bound[virtual] = physical

    def _compare_tables(self, step: int) -> None:
        for group in self._groups:
            virtual, physical = self._arena.tables.bound(group)
            expected = np.full(len(self._arena.device_tables.of(group)), -1)
            expected[virtual] = physical
            if not np.array_equal(self._arena.device_tables.of(group).cpu().numpy(), expected):
                raise ArenaCorrupt(f"step {step}: the tables of {group!r} differ between host and device")
            if dict(zip(virtual.tolist(), physical.tolist(), strict=True)) != self._bound[group]:
                raise ArenaCorrupt(f"step {step}: the table of {group!r} is not what the differences make")

    # -- poison --------------------------------------------------------------------------------------------------

    def _poison(self) -> None:
        """Fills what was freed and is nobody's: no page's, no move's target, no expert's."""
        freed, self._freed = self._freed, []
        if not freed:
            return
        pages = [(group, page) for group in self._groups for page in self._bound[group].values()]
        pages += [(move.group, move.target) for move, _ in self._moving.values()]
        taken = [self._span(*page) for page in pages]
        place = next((s.page_bytes for s in self._arena.specs.values() if s.kind is PageKind.EXPERT), 0)
        taken += [(at * place, (at + 1) * place) for at in self._usable]
        owned = np.zeros(len(self._arena.buffer) // 128 + 1, dtype=np.bool_)
        for low, high in taken:
            owned[low // 128 : -(-high // 128)] = True
        for low, high in freed:
            lines = np.flatnonzero(~owned[low // 128 : high // 128]) + low // 128
            for run in np.split(lines, np.flatnonzero(np.diff(lines) > 1) + 1):
                if len(run):
                    self._arena.buffer[128 * int(run[0]) : 128 * (int(run[-1]) + 1)] = POISON
                    self.num_poisoned += len(run)
        self._arena.mover.hold_lanes_back()

    def _span(self, group: str, page: int) -> Span:
        grid = self._arena.grids[group]
        low = grid[page].data_ptr() - self._arena.buffer.data_ptr()
        return low, low + grid.shape[1]

    def _hash(self, group: str, page: int) -> int:
        return int(hash_blocks(self._arena.grids[group][page]))
