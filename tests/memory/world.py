"""A small world for the ledger: requests with tokens, steps in flight on a pretended device, and proof after each act.

What a page must hold follows from its request's tokens alone: a FULL or WINDOW page shows a hash of all tokens up to
its last written one, a STATE page a hash of all tokens. So sharing, copying on write, moving and reuse are all
checked by the same reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memory.api import NO_MATCH, Grant, PageAsk, PageKind, PageSpec, PrefixMatch, Shortage
from memory.ledger.ledger import ArenaLedger
from memory.ledger.specs import first_visible_page
from tests.memory.simulated import SimulatedDevice, Work


def page_tag(spec: PageSpec, tokens: Sequence[int], logical: int, num_computed: int) -> object:
    """What logical page ``logical`` shows when ``num_computed`` tokens are computed."""
    if spec.kind is PageKind.STATE:
        return ("state", hash(tuple(tokens[:num_computed])))
    end = min(num_computed, (logical + 1) * spec.page_tokens)
    return (spec.name, logical, hash(tuple(tokens[:end])))


@dataclass
class Running:
    """A running request; ``num_computed`` counts tokens of steps planned so far, ``num_done`` of steps run."""

    number: int
    tokens: list[int]
    num_computed: int = 0
    num_done: int = 0


@dataclass
class Pinned:
    """What a transfer reads: (group, virtual page, physical page once the next step has run)."""

    pin: int
    number: int
    pages: list[tuple[str, int]]
    since_step: int
    places: dict[tuple[str, int], int | None] = field(default_factory=dict)
    content: dict[tuple[str, int], object] = field(default_factory=dict)
    """what the pages show since their request has ended: nobody writes them any more"""


class World:
    """Requests, a ledger and a device in step. ``depth``: most steps in flight."""

    def __init__(
        self,
        ledger: ArenaLedger,
        arena_bytes: int,
        place_bytes: int = 0,
        late: Callable[[], bool] | None = None,
    ) -> None:
        self.ledger = ledger
        self.specs = [spec for spec in ledger.specs.values() if spec.kind is not PageKind.EXPERT]
        self.device = SimulatedDevice(ledger.grids, arena_bytes, place_bytes, late)
        self.arena_bytes = arena_bytes
        self.running: dict[int, Running] = {}
        self.pins: list[Pinned] = []
        self.step = 0
        self.completed = 0
        self.next_number = 0
        self.no_work = Work()

    # -- acts ----------------------------------------------------------------------------------------------------

    def plan(self, chunks: dict[int, int], admit: Sequence[tuple[list[int], int]] = ()) -> list[int]:
        """Plans and submits one step: running requests compute ``chunks[number]`` more tokens where there is room;
        ``admit`` starts requests of (tokens, chunk). Answers the numbers of the requests admitted."""
        self.step += 1
        self.ledger.begin_step(self.step, self.completed)
        reads: list[tuple[str, int, object]] = []
        writes: list[tuple[str, int, object]] = []
        admitted = []
        for number, chunk in chunks.items():
            self._compute(self.running[number], chunk, NO_MATCH, reads, writes)
        for tokens, chunk in admit:
            request = Running(self.next_number, tokens)
            match = self.ledger.match(tokens)
            request.num_computed = request.num_done = match.num_tokens
            if self._compute(request, max(1, chunk), match, reads, writes):
                self.running[request.number] = request
                admitted.append(request.number)
                self.next_number += 1
        self.device.submit(self.ledger.commit_step(self.step), Work(reads, writes))
        return admitted

    def _compute(
        self,
        request: Running,
        chunk: int,
        match: PrefixMatch,
        reads: list[tuple[str, int, object]],
        writes: list[tuple[str, int, object]],
    ) -> bool:
        before = request.num_computed
        after = min(len(request.tokens), before + chunk)
        if after == before:
            return False
        answer = self.ledger.grant(PageAsk(request.number, after, before, match))
        if isinstance(answer, Shortage):
            return False
        assert isinstance(answer, Grant)
        for spec in self.specs:
            run = self.ledger.pages(request.number, spec.name)
            state = spec.kind is PageKind.STATE
            size = 1 if state else spec.page_tokens
            held = 1 if state else -(-before // size)
            if before:
                for logical in range(0 if state else first_visible_page(spec, before), held):
                    page = run.pages[logical - run.first]
                    reads.append((spec.name, page, page_tag(spec, request.tokens, logical, before)))
            for logical in range(0 if state else before // size, 1 if state else -(-after // size)):
                page = run.pages[logical - run.first]
                writes.append((spec.name, page, page_tag(spec, request.tokens, logical, after)))
        request.num_computed = after
        return True

    def finish_step(self) -> None:
        """The device runs the oldest step and the host applies its result."""
        self.completed = self.device.run_step()
        self.ledger.end_step(self.completed)
        for pinned in self.pins:
            if pinned.since_step <= self.completed:
                self.check_pin(pinned)

    def finish_all(self) -> None:
        """Runs every step in flight."""
        while self.device.queue:
            self.finish_step()

    def release(self, number: int, donate: bool) -> None:
        """Ends a request, as the scheduler does: after the steps in flight were applied when it donates."""
        if donate:
            self.finish_all()
        request = self.running.pop(number)
        if donate:
            self.ledger.release(number, request.tokens, request.num_computed)
        else:
            self.ledger.release(number)

    def pin(self, number: int) -> None:
        """A transfer starts to read a request's pages, behind the step submitted next."""
        pages = [(s.name, page) for s in self.specs for page in self.ledger.pages(number, s.name).pages]
        self.pins.append(Pinned(self.ledger.pin(number), number, pages, self.step + 1))

    def unpin(self, pinned: Pinned) -> None:
        """The transfer ends."""
        self.pins.remove(pinned)
        self.ledger.unpin(pinned.pin)

    def check_pin(self, pinned: Pinned) -> None:
        """A pinned page stays where it was; once its request has ended, its content stays too."""
        ended = pinned.number not in self.running and not self.device.queue
        for group, virtual in pinned.pages:
            physical = self.device.tables[group].get(virtual)
            place = pinned.places.setdefault((group, virtual), physical)
            assert physical == place, f"pinned {group} page {virtual} went from {place} to {physical}"
            if ended and physical is not None:
                now = self.device.read(group, physical)
                then = pinned.content.setdefault((group, virtual), now)
                assert now == then, f"pinned {group} page {virtual} shows {now!r} instead of {then!r}"

    # -- proof ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Audit, conservation of bytes in the headroom, and with no step in flight every request's content."""
        self.ledger.audit()
        if not self.device.queue:
            self._check_content()
        headroom = self.ledger.headroom()
        kinds = headroom.kinds.values()
        extents = sum(
            k.free_bytes + k.reclaimable_bytes + k.pending_bytes + k.pinned_bytes + k.used_bytes
            for k in kinds
        )
        assert headroom.arena_bytes == self.arena_bytes
        assert all(
            min(k.free_bytes, k.reclaimable_bytes, k.pending_bytes, k.pinned_bytes, k.used_bytes) >= 0
            for k in kinds
        )
        assert headroom.gap_bytes + extents + self.ledger.held_back_bytes() == self.arena_bytes

    def _check_content(self) -> None:
        for number, request in self.running.items():
            done = request.num_computed
            for spec in self.specs:
                run = self.ledger.pages(number, spec.name)
                state = spec.kind is PageKind.STATE
                first = 0 if state else first_visible_page(spec, done)
                for logical in range(first, 1 if state else -(-done // spec.page_tokens)):
                    page = run.pages[logical - run.first]
                    found = self.device.read(spec.name, self.device.physical(spec.name, page))
                    tag = page_tag(spec, request.tokens, logical, done)
                    assert found == tag, (
                        f"request {number}: {spec.name} page {logical} shows {found!r}, not {tag!r}"
                    )
