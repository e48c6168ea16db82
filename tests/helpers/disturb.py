"""Makes an engine's memory restless: pages move at every step, prefixes are lost, rows sent back, lanes late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from memory.api import StepCommands
from memory.device.lanes import Lane, Mark
from memory.ledger.ledger import ArenaLedger
from memory.ledger.page_pool import BOUND
from memory.ledger.spans import SpanSet
from worker.engines.native import NativeEngine
from worker.scheduling.step import StepPlan


class LateLanes:
    """Streams without a GPU, each as late as anybody can bear: work is done when something that must wait for it is,
    or when the host has asked often enough. With ``computes`` the compute stream is late as well; without, it does
    everything at once, as a CPU's model does. ``hasty`` lanes are the contrary: they do their work at once, and of the
    others only what they must wait for."""

    def __init__(self, patience: int = 24, computes: bool = False, hasty: bool = False) -> None:
        self._queues: dict[object, deque[_LateMark]] = {name: deque() for name in (*Lane, None)}
        self._patience, self._computes, self._hasty = patience, computes, hasty
        self._clock = 0
        self.num_late = 0
        """pieces of work that were still undone when another was launched"""

    def mark(self) -> Mark:
        """See :class:`memory.device.lanes.Lanes`."""
        return self._add(None, (), lambda: None)

    def run(self, lane: Lane, behind: Sequence[Mark], work: Callable[[], None]) -> Mark:
        """See :class:`memory.device.lanes.Lanes`."""
        self.num_late += len(self._queues[lane])
        return self._add(lane, behind, work)

    def compute(self, work: Callable[[], None]) -> None:
        """See :class:`memory.device.lanes.Lanes`."""
        self._add(None, (), work)

    def wait(self, mark: Mark) -> None:
        """See :class:`memory.device.lanes.Lanes`."""
        self._add(None, (mark,), lambda: None)

    def finish(self, mark: Mark) -> None:
        """See :class:`memory.device.lanes.Lanes`."""
        assert isinstance(mark, _LateMark)
        self.force(mark)

    def _add(self, stream: Lane | None, behind: Sequence[Mark], work: Callable[[], None]) -> _LateMark:
        mark = _LateMark(self, stream, behind, work, self._clock + self._patience)
        self._queues[stream].append(mark)
        if (stream is None and not self._computes) or (stream is not None and self._hasty):
            self.force(mark)
        return mark

    def force(self, mark: _LateMark) -> None:
        """Does a stream's work up to a mark, and what that must wait for."""
        queue = self._queues[mark.stream]
        while not mark.done:
            first = queue.popleft()
            for earlier in first.behind:
                self.finish(earlier)
            first.work()
            first.done = True

    def ask(self, mark: _LateMark) -> bool:
        """Whether a mark is passed: at the latest when everybody has asked long enough."""
        self._clock += 1
        if self._clock > mark.due:
            self.force(mark)
        return mark.done


class _LateMark:
    def __init__(
        self,
        lanes: LateLanes,
        stream: Lane | None,
        behind: Sequence[Mark],
        work: Callable[[], None],
        due: int,
    ) -> None:
        self.lanes, self.stream, self.behind, self.work, self.due = lanes, stream, behind, work, due
        self.done = False

    def is_done(self) -> bool:
        return self.lanes.ask(self)


def move_some_pages(ledger: ArenaLedger, dice: random.Random, most: int = 3) -> None:
    """Plans up to ``most`` moves per group in the open step: of any page that may move, to any page that is free."""
    book = ledger._book
    relocator, step = book.relocator, book.open_step
    avoid = SpanSet()
    for span in relocator.still_read(book.completed_step):
        avoid.add(*span)
    for group, pool in enumerate(book.pools):
        if not pool.num_free:
            book.layout.grow(group, 1)
        bound = [page for page in range(pool.first, pool.last) if pool.state[page] == BOUND]
        dice.shuffle(bound)
        targets = relocator._targets(
            pool, (pool.first, pool.last), most, from_low=dice.random() < 0.5, avoid=avoid
        )
        for page in bound:
            if not targets:
                break
            virtual = pool.owner[page]
            if not relocator.movable(group, virtual):
                continue
            if relocator.may_copy_beside(group, virtual, book.completed_step):
                relocator.copy_beside(group, page, targets.pop(), step)
            else:
                relocator.move_now(group, page, targets.pop())


def disturb(engine: NativeEngine, seed: int, lanes: Any = None) -> None:
    """From now on: moves at every step, all cached prefixes lost now and then, the latest row sent back now and then;
    steps are planned one ahead. ``lanes`` replace the arena's. Before the first request."""
    dice = random.Random(seed)
    ledger, scheduler, arena = engine._ledger, engine._scheduler, engine._runner.arena  # type: ignore[attr-defined]
    engine._loop._overlap = True
    if lanes is not None:
        arena.mover.lanes = lanes
    schedule, commit = scheduler.schedule, ledger.commit_step
    everything = dict.fromkeys(ledger.grids, 1 << 60)

    def disturbed_schedule(step: int) -> StepPlan:
        taken = scheduler.rows.taken()
        if step % 7 == 3 and len(taken) > 1:
            scheduler.running.send_back(int(taken[-1]))
        if step % 23 == 11:
            ledger.shed(everything)
        return schedule(step)

    def disturbed_commit(step: int) -> StepCommands:
        move_some_pages(ledger, dice)
        return commit(step)

    scheduler.schedule = disturbed_schedule  # type: ignore[method-assign]
    ledger.commit_step = disturbed_commit  # type: ignore[method-assign]
