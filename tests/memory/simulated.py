"""Runs step commands on pretended bytes, in stream order and behind the host, and says when any byte is wrong.

Cells of 128 bytes hold tags instead of data. Steps wait in a queue and run later than they were planned, as on a GPU;
copies of sealed pages run at the worst moment their step allows. Beside that, what :meth:`SimulatedDevice.submit` is
handed is held against a stricter rule: no byte that a step in flight reads may be given to anybody else, except bytes
that a move on the compute stream vacates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from memory.api import Move, StepCommands
from memory.ledger.specs import Grid

CELL_BYTES = 128
Span = tuple[int, int]


class WrongBytes(AssertionError):
    """The commands made some reader see bytes that are not its own."""


@dataclass(frozen=True)
class Work:
    """What a step does: pages it reads with the tag they must show, and pages it writes with their new tag."""

    reads: Sequence[tuple[str, int, object]] = ()
    writes: Sequence[tuple[str, int, object]] = ()


@dataclass
class _InFlight:
    commands: StepCommands
    work: Work
    spans: list[Span] = field(default_factory=list)
    """Bytes that the step and its side copies read."""


class SimulatedDevice:
    """One arena. ``late``: whether the next side copy runs at the end of its step instead of its begin."""

    def __init__(
        self,
        grids: Mapping[str, Grid],
        arena_bytes: int,
        place_bytes: int = 0,
        late: Callable[[], bool] | None = None,
    ) -> None:
        self.grids = grids
        self.place_bytes = place_bytes
        self.cells: list[object] = [None] * (arena_bytes // CELL_BYTES)
        self.host: dict[tuple[str, int], object] = {}
        self.tables: dict[str, dict[int, int]] = {name: {} for name in grids}
        self.usable: set[int] = set()
        self.queue: deque[_InFlight] = deque()
        self._late = late or (lambda: False)
        self._flipping: dict[tuple[str, int], int] = {}
        self._planned: dict[str, dict[int, int]] = {
            name: {} for name in grids
        }  # the tables once the queue is empty

    # -- bytes ---------------------------------------------------------------------------------------------------

    def span(self, group: str, page: int) -> Span:
        """Bytes of a physical page."""
        low = self.grids[group].address(page)
        return low, low + self.grids[group].page_bytes

    def read(self, group: str, page: int) -> object:
        """The tag of a physical page; the set of tags if it is torn."""
        low, high = self.span(group, page)
        tags = set(self.cells[low // CELL_BYTES : high // CELL_BYTES])
        return tags.pop() if len(tags) == 1 else tags

    def write(self, group: str, page: int, tag: object) -> None:
        """Fills a physical page."""
        low, high = self.span(group, page)
        self.cells[low // CELL_BYTES : high // CELL_BYTES] = [tag] * ((high - low) // CELL_BYTES)

    def physical(self, group: str, virtual: int) -> int:
        """Where the table of the steps run so far has a page."""
        if virtual not in self.tables[group]:
            raise WrongBytes(f"{group}: virtual page {virtual} is in no table")
        return self.tables[group][virtual]

    # -- the host's side -----------------------------------------------------------------------------------------

    def submit(self, commands: StepCommands, work: Work) -> None:
        """Queues a step, and proves that its commands respect the readers in flight."""
        vacated = [self.span(m.group, m.source) for f in self.queue for m in f.commands.moves if not m.sealed]
        now_vacated = [self.span(m.group, m.source) for m in commands.moves if not m.sealed]
        busy = [span for flight in self.queue for span in flight.spans]
        self._check_batch(commands.moves)
        for move in commands.moves:
            target = self.span(move.group, move.target)
            self._expect_apart(target, busy, vacated if not move.sealed else [], f"{move} overwrites")
        for update in commands.table:
            moved = {move.virtual for move in commands.moves if move.group == update.group}
            for virtual, physical in zip(update.virtual, update.physical, strict=True):
                before = self._planned[update.group].get(virtual)
                if physical < 0:
                    self._planned[update.group].pop(virtual, None)
                    continue
                self._planned[update.group][virtual] = physical
                if (
                    virtual not in moved
                    and physical != before
                    and not self._side_copied(update.group, virtual, physical)
                ):
                    span = self.span(update.group, physical)
                    self._expect_apart(
                        span, busy, vacated + now_vacated, f"{update.group} {virtual} is bound over"
                    )
        for places in commands.allow:
            span = (places.first * self.place_bytes, places.last * self.place_bytes)
            self._expect_apart(span, busy + now_vacated, [], f"{places} is allowed over")
        flight = _InFlight(commands, work)
        for group, virtual, _ in [*work.reads, *work.writes]:
            if virtual not in self._planned[group]:
                raise WrongBytes(f"step {commands.step} names {group} page {virtual}, which no table has")
            flight.spans.append(self.span(group, self._planned[group][virtual]))
        flight.spans += [self.span(m.group, page) for m in commands.moves for page in (m.source, m.target)]
        for copy in commands.copies:
            flight.spans += [self.span(copy.group, copy.source)] if not copy.from_host else []
            flight.spans += [self.span(copy.group, copy.target)] if not copy.to_host else []
        self.queue.append(flight)

    def _side_copied(self, group: str, virtual: int, physical: int) -> bool:
        """Whether the entry flips to the target of a side copy whose step has run."""
        return self._flipping.pop((group, virtual), None) == physical

    def _check_batch(self, moves: Sequence[Move]) -> None:
        sources = [self.span(move.group, move.source) for move in moves]
        targets = [self.span(move.group, move.target) for move in moves]
        for index, target in enumerate(targets):
            self._expect_apart(target, sources, [], f"{moves[index]} of one batch overwrites a source at")
            self._expect_apart(
                target, targets[:index], [], f"{moves[index]} of one batch overwrites a target at"
            )

    def _expect_apart(self, span: Span, busy: Sequence[Span], exempt: Sequence[Span], what: str) -> None:
        for low, high in busy:
            if low < span[1] and span[0] < high and (low, high) not in exempt:
                raise WrongBytes(f"{what} bytes {low}..{high}, which a step in flight uses")

    # -- the device's side ---------------------------------------------------------------------------------------

    def run_step(self) -> int:
        """Runs the oldest queued step; answers its number."""
        flight = self.queue.popleft()
        commands = flight.commands
        for places in commands.ban:
            self.usable -= set(range(places.first, places.last))
        late = self._run_moves(commands.moves)
        for copy in commands.copies:
            tag = self.host[copy.group, copy.source] if copy.from_host else self.read(copy.group, copy.source)
            if copy.to_host:
                self.host[copy.group, copy.target] = tag
            else:
                self.write(copy.group, copy.target, tag)
        for update in commands.table:
            for virtual, physical in zip(update.virtual, update.physical, strict=True):
                if physical < 0:
                    self.tables[update.group].pop(virtual, None)
                else:
                    self.tables[update.group][virtual] = physical
        for places in commands.allow:
            self.usable |= set(range(places.first, places.last))
        for place in self.usable:
            low = place * self.place_bytes // CELL_BYTES
            high = (place + 1) * self.place_bytes // CELL_BYTES
            self.cells[low:high] = ["expert"] * (high - low)
        self._run_work(commands.step, flight.work)
        for move in late:
            self.write(move.group, move.target, self.read(move.group, move.source))
        return commands.step

    def _run_moves(self, moves: Sequence[Move]) -> list[Move]:
        beside = [move for move in moves if move.sealed]
        late = [move for move in beside if self._late()]
        for move in beside:
            self._flipping[move.group, move.virtual] = move.target
            if move not in late:
                self.write(move.group, move.target, self.read(move.group, move.source))
        between = [move for move in moves if not move.sealed]
        tags = [self.read(move.group, move.source) for move in between]
        for move, tag in zip(between, tags, strict=True):
            self.write(move.group, move.target, tag)
        return late

    def _run_work(self, step: int, work: Work) -> None:
        for group, virtual, tag in work.reads:
            found = self.read(group, self.physical(group, virtual))
            if found != tag:
                raise WrongBytes(f"step {step} reads {found!r} in {group} page {virtual}, not {tag!r}")
        for group, virtual, tag in work.writes:
            self.write(group, self.physical(group, virtual), tag)
