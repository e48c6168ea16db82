"""What moves pages, on streams that are late: each step in flight sees its own tables and its own bytes."""

from __future__ import annotations

import random

import pytest
import torch

from memory.api import (
    LayerRows,
    Move,
    PageCopy,
    PageKind,
    PageSpec,
    PlaceRange,
    Row,
    StepCommands,
    TableUpdate,
)
from memory.device.arena import Arena
from memory.device.lanes import Lane, make_lanes
from memory.device.mover import _launches
from memory.device.watch import POISON, ArenaCorrupt, ArenaWatch
from tests.helpers.disturb import LateLanes

FULL = PageSpec("full", PageKind.FULL, 4, (LayerRows(0, (Row("k", (32,), "uint8"),)),))
STATE = PageSpec("state", PageKind.STATE, 1, (LayerRows(1, (Row("s", (384,), "uint8"),)),))
NEVER = 1 << 40


def small_arena(lanes: LateLanes | None = None, host_bytes: int = 2048) -> Arena:
    arena = Arena([FULL, STATE], 64 * 128, torch.device("cpu"), host_bytes)
    if lanes is not None:
        arena.mover.lanes = lanes
    return arena


def bind(group: str, *pairs: tuple[int, int]) -> TableUpdate:
    return TableUpdate(group, tuple(v for v, _ in pairs), tuple(p for _, p in pairs))


def test_a_step_in_flight_sees_its_own_tables_and_bytes() -> None:
    """Eight steps are planned before the device runs the first: more than the ring has buffers."""
    lanes = LateLanes(NEVER, computes=True)
    arena, dice = small_arena(lanes), random.Random(1)
    where = {virtual: virtual + 10 for virtual in range(6)}
    for virtual, page in where.items():
        arena.grids["full"][page] = virtual
    arena.apply(StepCommands(0, table=(bind("full", *where.items()),)))
    seen: list[tuple[list[int], list[int]]] = []
    expected = []

    def look() -> None:
        physical = arena.device_tables.physical("full", torch.arange(6))
        seen.append((physical.tolist(), arena.grids["full"][physical, 0].tolist()))

    for step in range(1, 9):
        virtual = dice.randrange(6)
        old, new = where[virtual], 20 + step
        where[virtual] = new
        move = Move("full", virtual, old, new, sealed=False)
        arena.apply(StepCommands(step, moves=(move,), table=(bind("full", (virtual, new)),)))
        lanes.compute(look)
        expected.append(([where[v] for v in range(6)], list(range(6))))
        assert arena.tables.physical("full", torch.arange(6).numpy()).tolist() == expected[-1][0]
    lanes.finish(lanes.mark())
    assert seen == expected


def test_a_step_is_finished_only_with_its_lanes() -> None:
    lanes = LateLanes(NEVER)
    arena = small_arena(lanes)
    arena.grids["full"][3] = 7
    arena.apply(StepCommands(0, table=(bind("full", (0, 3)),)))
    assert arena.finished(0) == 0
    arena.apply(StepCommands(1, moves=(Move("full", 0, 3, 9, sealed=True),)))
    arena.apply(StepCommands(2, copies=(PageCopy("full", 3, 0, to_host=True),)))
    arena.apply(StepCommands(3, table=(bind("full", (1, 4)),)))
    assert arena.grids["full"][9, 0] == 0, "the lane is late"
    (_, (moved,)), (_, (sent,)) = arena.mover._beside
    assert [arena.finished(step) for step in (0, 1, 2, 3)] == [0, 0, 0, 0]
    lanes.finish(moved)
    assert [arena.finished(step) for step in (1, 2, 3)] == [1, 1, 1]
    lanes.finish(sent)
    assert [arena.finished(step) for step in (2, 3)] == [2, 3]
    assert arena.grids["full"][9, 0] == 7
    assert arena.host.page("full", 0)[0] == 7


def test_what_lanes_still_read_is_waited_for() -> None:
    """To the host and straight back; and a page that a lane reads to the host moves and is written over."""
    arena = small_arena(LateLanes(NEVER))
    grid = arena.grids["full"]
    for page in range(8):
        grid[page] = page
    arena.apply(StepCommands(0, copies=tuple(PageCopy("full", p, p, to_host=True) for p in range(4))))
    arena.apply(StepCommands(1, copies=(PageCopy("full", 2, 20, from_host=True),)))
    assert grid[20, 0] == 2
    arena.apply(StepCommands(2, copies=(PageCopy("full", 5, 5, to_host=True),)))
    arena.apply(StepCommands(3, moves=(Move("full", 0, 5, 30, sealed=False),)))
    grid[5] = 99  # step 3 writes the bytes that its move left
    arena.mover.join()
    assert arena.host.page("full", 5)[0] == 5
    assert grid[30, 0] == 5


@pytest.mark.parametrize("given_away", ["move", "ban", "nothing"])
def test_what_comes_back_waits_for_bytes_given_away_and_for_nothing_else(given_away: str) -> None:
    """The device is a step behind, and the link is quick."""
    lanes = LateLanes(NEVER, computes=True, hasty=True)
    arena = small_arena(lanes)
    grid = arena.grids["full"]
    arena.host.page("full", 0).fill_(9)
    grid[5] = 5
    seen: list[int] = []
    lanes.compute(lambda: seen.append(int(grid[5, 0])))  # a step in flight
    if given_away == "move":
        arena.apply(StepCommands(1, moves=(Move("full", 0, 5, 6, sealed=False),)))
    elif given_away == "ban":
        arena.apply(StepCommands(1, ban=(PlaceRange(0, 1),)))
    arena.apply(StepCommands(2, copies=(PageCopy("full", 0, 5, from_host=True),)))
    assert grid[5, 0] == 9
    assert seen == ([] if given_away == "nothing" else [5])
    lanes.finish(lanes.mark())
    assert grid[6, 0] == (5 if given_away == "move" else 0)


def test_copies_keep_their_order_in_few_launches() -> None:
    copies = [("full", 1, 2), ("state", 8, 9), ("full", 3, 4), ("full", 2, 5), ("full", 6, 1), ("full", 7, 1)]
    launches = _launches(copies)
    assert [(x.group, x.sources, x.targets) for x in launches] == [
        ("full", [1, 3], [2, 4]),
        ("state", [8], [9]),
        ("full", [2, 6], [5, 1]),
        ("full", [7], [1]),
    ]
    arena = small_arena()
    for page in range(8):
        arena.grids["full"][page] = page
    arena.apply(StepCommands(0, copies=tuple(PageCopy(*copy) for copy in copies)))
    assert arena.grids["full"][:6, 0].tolist() == [0, 7, 1, 3, 3, 1]


def test_numbers_kept_by_a_late_lane_are_not_written_over() -> None:
    arena = small_arena(LateLanes(NEVER))
    for page in range(10):
        arena.grids["full"][page] = page
    for step in range(9):
        arena.apply(StepCommands(step, moves=(Move("full", step, step, 20 + step, sealed=True),)))
    arena.mover.join()
    assert arena.grids["full"][20:29, 0].tolist() == list(range(9))


def test_a_step_may_bring_more_numbers_than_the_ring_holds() -> None:
    arena = Arena([FULL], 40_000 * 128, torch.device("cpu"))
    pages = range(20_000)
    arena.apply(StepCommands(0, table=(bind("full", *((page, 39_999 - page) for page in pages)),)))
    assert arena.device_tables.of("full")[:20_000].tolist() == [39_999 - page for page in pages]


def test_the_host_tier_has_exactly_its_budget() -> None:
    host = small_arena(host_bytes=2048).host
    assert host.num_bytes == 5 * 384
    assert host.page("full", 14).numel() == 128
    for group, slot in (("full", 15), ("state", 5), ("state", -1)):
        with pytest.raises(LookupError, match="beyond the 1920 bytes"):
            host.page(group, slot)


def test_tables_have_room_for_every_page_and_no_more() -> None:
    arena = small_arena()
    arena.apply(StepCommands(0, table=(bind("full", (63, 0)),)))
    assert arena.device_tables.physical("full", torch.tensor([63, -1, 5])).tolist() == [0, -1, -1]
    with pytest.raises(LookupError, match="no virtual page 64"):
        arena.apply(StepCommands(1, table=(bind("full", (64, 1)),)))


def test_freed_bytes_are_poisoned_unless_somebody_has_them() -> None:
    arena = small_arena()
    arena.watch = ArenaWatch(arena)
    assert (arena.buffer == POISON).all()
    arena.apply(StepCommands(0, table=(bind("full", (0, 2), (1, 4)), bind("state", (0, 10)))))
    arena.buffer.zero_()
    # Page 2 is freed; page 4 is freed too, but a state takes its bytes in the same step.
    arena.apply(StepCommands(1, table=(bind("full", (0, -1), (1, -1)), bind("state", (1, 1)))))
    arena.apply(StepCommands(2, table=(bind("full", (2, 40)),)))
    assert (arena.grids["full"][2] == POISON).all()
    assert (arena.grids["state"][1] == 0).all(), "bytes of a page in use were poisoned"
    assert int((arena.buffer == POISON).sum()) == 128


@pytest.mark.parametrize("what", ["mutable", "sealed", "copy", "host", "table"])
def test_the_watch_sees_every_kind_of_wrong_byte(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = small_arena()
    arena.watch = ArenaWatch(arena)
    arena.apply(StepCommands(0, table=(bind("full", (0, 3), (1, 4)),)))
    arena.grids["full"][3] = 7
    arena.apply(StepCommands(1, copies=(PageCopy("full", 3, 0, to_host=True),)))
    wrong = {
        "mutable": StepCommands(
            2, moves=(Move("full", 0, 3, 9, sealed=False),), table=(bind("full", (0, 9)),)
        ),
        "sealed": StepCommands(2, moves=(Move("full", 0, 3, 9, sealed=True),)),
        "copy": StepCommands(2, copies=(PageCopy("full", 3, 4),)),
        "host": StepCommands(2, copies=(PageCopy("full", 0, 4, from_host=True),)),
        "table": StepCommands(2, table=(bind("full", (0, -1)),)),
    }[what]
    flip = StepCommands(3, table=(bind("full", (0, 9)),))
    arena.apply(StepCommands(2))  # all is well so far
    if what in ("mutable", "copy"):
        monkeypatch.setattr(arena.mover, "_copy", lambda launches: None)
    elif what == "host":
        arena.host.page("full", 0)[5] += 1
    elif what == "table":
        monkeypatch.setattr(arena.device_tables, "patch", lambda where, what: None)
    with pytest.raises(ArenaCorrupt):
        arena.apply(wrong)
        if what == "sealed":
            arena.grids["full"][3, 2] += 1  # a writer beside the copy
        arena.apply(flip)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_of_a_gpu_keep_the_order_while_the_host_runs_ahead() -> None:
    device = torch.device("cuda")
    spec = PageSpec("full", PageKind.FULL, 64, (LayerRows(0, (Row("k", (4096,), "uint8"),)),))
    arena = Arena([spec], 512 << 20, device, host_bytes=64 << 20)
    assert arena.host.pinned
    grid = arena.grids["full"]
    pages = torch.arange(64, device=device)
    grid[:64] = pages.to(torch.uint8).unsqueeze(1)
    arena.apply(StepCommands(0, table=(bind("full", *((p, p) for p in range(64))),)))
    seen, where, behind = [], list(range(64)), 0
    for step in range(1, 9):
        torch.cuda._sleep(20_000_000)  # the device is far behind the host
        moves = tuple(Move("full", p, where[p], 64 * step + p, sealed=False) for p in range(step, 64, 2))
        for move in moves:
            where[move.virtual] = move.target
        copies = (
            *(
                PageCopy("full", slot, 1000 + 100 * step + slot, from_host=True)
                for slot in range(8 * (step > 1))
            ),
            *(PageCopy("full", where[p], p, to_host=True) for p in range(8)),
        )
        table = (bind("full", *((move.virtual, move.target) for move in moves)),)
        arena.apply(StepCommands(step, moves=moves, copies=copies, table=table))
        physical = arena.device_tables.physical("full", pages)
        seen.append((physical, grid[physical].clone(), list(where)))
        for move in moves:
            grid[move.source] = 255
        behind += arena.finished(step) < step
    torch.cuda.synchronize()
    assert behind > 4, "the host did not run ahead"
    assert arena.finished(8) == 8
    for physical, content, expected in seen:
        assert physical.tolist() == expected
        assert (content == pages.to(torch.uint8).unsqueeze(1)).all()
    for slot in range(8):
        assert (arena.host.page("full", slot) == slot).all()
        for step in range(2, 9):
            assert (grid[1000 + 100 * step + slot] == slot).all()


def test_lanes_of_a_cpu_have_run_when_the_call_returns() -> None:
    lanes, seen = make_lanes(torch.device("cpu")), []
    mark = lanes.run(Lane.MOVE, [lanes.mark()], lambda: seen.append(1))
    lanes.wait(mark)
    assert mark.is_done()
    assert seen == [1]
