"""Carries out what a step needs done to pages ahead of it: moves, copies, host tier, table differences.

In the order of the compute stream, with what runs beside it::

    numbers          ring -> device, one copy
    sealed moves     MOVE lane, behind this moment; the ledger flips them when the step counts as finished
    other moves      compute stream, one launch per group
    copies, in their order:
      from the host  FROM_HOST lane, beside the step before; the compute stream waits for them: the step reads them
      inside         compute stream, one launch per group
      to the host    TO_HOST lane, behind this moment
    tables           compute stream, one launch for all groups

A step counts as finished only when its work in the lanes is done too: :meth:`PageMover.finished`. So the ledger's one
rule, no byte is used again before the last step that reads it has finished, covers copies beside the steps. What it
does not cover is a move *between* steps of a page that a lane still reads to the host: its old bytes may be written by
that very step, so the compute stream waits for that lane first.

What comes from the host need not wait for steps in flight: its pages were free when the step was planned, so no step
before it reads them. Only two things give bytes away that work in flight still reads, relying on the order of the
compute stream: moves between steps and bans of expert places. Behind the last of those the lane may begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import numpy as np
import torch

from kernels.pages import move_pages
from memory.api import PageCopy, StepCommands
from memory.device.host_tier import HostTier
from memory.device.lanes import Lane, Lanes, Mark
from memory.device.ring import IndexRing
from memory.device.tables import DeviceTables

Page = tuple[str, int]
Pair = tuple[torch.Tensor, torch.Tensor]


class _Side(Enum):
    BACK = "back"
    INSIDE = "inside"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class _Launch:
    """Pages of one group to be copied in one launch; none is both source and target."""

    group: str
    sources: list[int]
    targets: list[int]


class PageMover:
    """Moves the pages of one arena."""

    def __init__(
        self, grids: Mapping[str, torch.Tensor], host: HostTier, tables: DeviceTables, lanes: Lanes
    ) -> None:
        """``grids`` by group, [pages, page_bytes] uint8."""
        self.lanes = lanes
        self._grids = grids
        self._host = host
        self._tables = tables
        self._ring = IndexRing(next(iter(grids.values())).device)
        self._beside: deque[tuple[int, list[Mark]]] = deque()  # by step: ends of its work in lanes
        self._leaving: deque[tuple[Mark, frozenset[Page]]] = deque()  # pages that a lane reads to the host
        self._last_out: Mark | None = None
        self._given_away: Mark | None = None  # behind it nothing reads bytes that were given away at once

    def carry_out(self, commands: StepCommands) -> None:
        """Launches all of it; never waits for the device."""
        if commands.ban:
            self.hold_lanes_back()
        if not (commands.moves or commands.copies or commands.table):
            return
        sealed = _launches((m.group, m.source, m.target) for m in commands.moves if m.sealed)
        between = _launches((m.group, m.source, m.target) for m in commands.moves if not m.sealed)
        runs = [(side, list(run)) for side, run in groupby(commands.copies, _side)]
        inside = [
            _launches((copy.group, copy.source, copy.target) for copy in run) if side is _Side.INSIDE else []
            for side, run in runs
        ]
        launches = [*sealed, *between, *(launch for run in inside for launch in run)]
        lists = [np.array(pages) for launch in launches for pages in (launch.sources, launch.targets)]
        *numbers, where, what = self._ring.send([*lists, *self._tables.encode(commands.table)], self.lanes)
        # Taken one for one with the launches, in their order: zip asks its first argument first.
        pairs = iter(zip(numbers[::2], numbers[1::2], strict=True))
        ends: list[Mark] = []
        if sealed:
            ends.append(self._run_beside(list(zip(sealed, pairs, strict=False))))
        self._let_lanes_read(between)
        moving = list(zip(between, pairs, strict=False))
        self.lanes.compute(lambda: self._copy(moving))
        if between:
            self.hold_lanes_back()
        for number, ((side, run), copied) in enumerate(zip(runs, inside, strict=True)):
            if side is _Side.INSIDE:
                self._copy_inside(list(zip(copied, pairs, strict=False)))
            elif side is _Side.OUT:
                ends.append(self._send_out(run))
            else:
                ends.append(self._bring_back(run, self._given_away if number == 0 else self.lanes.mark()))
        self.lanes.compute(lambda: self._tables.patch(where, what))
        if ends:
            self._beside.append((commands.step, ends))

    def finished(self, step: int) -> int:
        """The last step up to ``step``, which has finished on the compute stream, whose work in the lanes is done as
        well. Never waits."""
        while self._beside and self._beside[0][0] <= step:
            if not all(mark.is_done() for mark in self._beside[0][1]):
                return self._beside[0][0] - 1
            self._beside.popleft()
        return step

    def join(self) -> None:
        """Makes the compute stream wait for all lanes (tests)."""
        for _, ends in self._beside:
            for mark in ends:
                self.lanes.wait(mark)

    def _copy(self, launches: Iterable[tuple[_Launch, Pair]]) -> None:
        for launch, (sources, targets) in launches:
            move_pages(self._grids[launch.group], sources, targets)

    def _copy_inside(self, launches: Sequence[tuple[_Launch, Pair]]) -> None:
        self.lanes.compute(lambda: self._copy(launches))

    def _run_beside(self, launches: Sequence[tuple[_Launch, Pair]]) -> Mark:
        # Behind this moment: the targets may be places that the step has just banned, and the numbers must be there.
        end = self.lanes.run(Lane.MOVE, [self.lanes.mark()], lambda: self._copy(launches))
        self._ring.keep(end)
        return end

    def _let_lanes_read(self, between: Sequence[_Launch]) -> None:
        """The compute stream waits for lanes that read a page which is about to leave its bytes."""
        moved = {(launch.group, page) for launch in between for page in launch.sources}
        while self._leaving and self._leaving[0][0].is_done():
            self._leaving.popleft()
        for mark, pages in self._leaving:
            if not moved.isdisjoint(pages):
                self.lanes.wait(mark)

    def hold_lanes_back(self) -> None:
        """What comes from the host from now on starts behind this moment of the compute stream."""
        self._given_away = self.lanes.mark()

    def _bring_back(self, copies: Sequence[PageCopy], after: Mark | None) -> Mark:
        def work() -> None:
            for copy in copies:
                self._host.load(copy.group, copy.source, self._grids[copy.group][copy.target])

        # A slot may be read as soon as its copy there is launched, so before that copy has run.
        behind = [mark for mark in (after, self._last_out) if mark is not None]
        end = self.lanes.run(Lane.FROM_HOST, behind, work)
        self.lanes.wait(end)
        return end

    def _send_out(self, copies: Sequence[PageCopy]) -> Mark:
        def work() -> None:
            for copy in copies:
                self._host.store(copy.group, copy.target, self._grids[copy.group][copy.source])

        end = self.lanes.run(Lane.TO_HOST, [self.lanes.mark()], work)
        self._leaving.append((end, frozenset((copy.group, copy.source) for copy in copies)))
        self._last_out = end
        return end


def _side(copy: PageCopy) -> _Side:
    return _Side.BACK if copy.from_host else _Side.OUT if copy.to_host else _Side.INSIDE


def _launches(copies: Iterable[tuple[str, int, int]]) -> list[_Launch]:
    """(group, source, target) in order, gathered into as few launches as give the same bytes."""
    found: list[_Launch] = []
    latest: dict[str, _Launch] = {}
    read: dict[str, set[int]] = {}
    written: dict[str, set[int]] = {}
    for group, source, target in copies:
        launch = latest.get(group)
        if launch is None or source in written[group] or target in written[group] or target in read[group]:
            launch = latest[group] = _Launch(group, [], [])
            read[group], written[group] = set(), set()
            found.append(launch)
        launch.sources.append(source)
        launch.targets.append(target)
        read[group].add(source)
        written[group].add(target)
    return found
