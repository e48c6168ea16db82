"""A step's kernels against the tensor operations: same tables and answers, whatever went before."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from kernels._triton import residency_gather
from kernels.hashing import hash_blocks
from kernels.residency import FusedResidency, fused_residency
from memory.api import PlaceRange
from memory.device.commands import encode_places
from memory.device.residency import BANNED, FREE, Residency, ResidencyRules
from memory.device.residency_check import ResidencyCheck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, EXPERTS, PER_TOKEN, PLACE_BYTES, BASE = 3, 12, 3, 256, 1 << 20


def a_residency(
    num_places: int, policy: str, queue_places: int, freezes: bool = True, ranked: bool = True
) -> Residency:
    host = torch.arange(ROWS * EXPERTS, device=DEVICE).view(ROWS, EXPERTS) * 4096 + (1 << 30)
    rules = ResidencyRules(policy, queue_places, freezes, ranked)
    found = Residency(host, BASE, PLACE_BYTES, num_places, rules)
    found._fused = None  # the tensor operations, on a GPU too
    return found


def allow(residency: Residency, first: int, stop: int) -> None:
    for block in encode_places([], [PlaceRange(first, stop)]):
        residency.apply(block.to(DEVICE))


def ban(residency: Residency, first: int, stop: int) -> None:
    for block in encode_places([PlaceRange(first, stop)], []):
        residency.apply(block.to(DEVICE))


def kernels_over(residency: Residency) -> FusedResidency:
    found = fused_residency(
        residency.tables(), residency.ghosts.tables(), residency.fused_rules(), on_cpu=True
    )
    assert found is not None
    return found


def compare(plain: Residency, other: Residency, when: str) -> None:
    ours, theirs = {**other.tables(), **other.ghosts.tables()}, {**plain.tables(), **plain.ghosts.tables()}
    for name in ("address", "owner", "stamp", "generation", "seen", "uses"):
        ours[name], theirs[name] = ours[name][:-1], theirs[name][:-1]  # the last entry takes masked writes
    del ours["ready"], theirs["ready"]
    for name, table in theirs.items():
        assert torch.equal(ours[name], table), f"{name} {when}"


@pytest.mark.parametrize(
    ("policy", "num_places", "queue_places", "freezes", "ranked"),
    [
        ("lfru", 5, 64, True, True),
        ("lfru", 20, 7, True, True),
        ("lfru", 9, 64, True, False),
        ("lru", 40, 1024, False, False),
        ("lru", 4, 2, True, True),
    ],
)
def test_the_kernels_do_what_the_tensor_operations_do(
    policy: str, num_places: int, queue_places: int, freezes: bool, ranked: bool
) -> None:
    plain = a_residency(num_places, policy, queue_places, freezes, ranked)
    allow(plain, 0, num_places - 1)
    other = copy.deepcopy(plain)
    kernels = kernels_over(other)
    torch.manual_seed(num_places)
    took = ghosts = 0
    for step in range(1, 11):
        if step in (4, 7):  # a band takes places, and gives them back
            for residency in (plain, other):
                (ban if step == 4 else allow)(residency, 0, num_places // 3)
        tokens = 40 if step == 6 else 1 + step % 7
        stamping = int(torch.randint(0, tokens + 1, ())) if step % 3 else tokens
        plain.begin_step(step, stamping)
        kernels.begin_step(step, stamping)
        compare(plain, other, f"at the start of step {step}")
        for row in range(ROWS):
            experts = torch.rand(tokens, EXPERTS).topk(PER_TOKEN).indices.to(DEVICE)
            experts[torch.rand(tokens) < 0.2] = -1
            want = plain.decide(row, experts, row - 1)
            got, read = kernels.decide(row, experts, row - 1, with_read=True)
            assert torch.equal(got, want), f"step {step}, row {row}"
            assert torch.equal(read, torch.where(want > 0, want, plain.address[row]))
            compare(plain, other, f"at step {step}, row {row}")
            took += int((got > 0).sum())
        plain.publish(ROWS - 1)
        kernels.publish(ROWS - 1)
        compare(plain, other, f"behind step {step}")
        ghosts += int(plain.ghosts.num)
    assert not other.audit()
    assert took >= 3, "nothing ever took a place: the test shows nothing"
    assert ghosts > 0, "nothing was ever lost"


def test_the_victims_of_a_large_pool_are_its_least_worthy_in_order() -> None:
    """More experts than a program ranks or a loop's turn compares, ties among them, and free places in between."""
    rows, experts, places = 6, 96, 700
    generator = torch.Generator().manual_seed(5)
    host = torch.arange(rows * experts, device=DEVICE).view(rows, experts) * 4096 + (1 << 30)
    plain = Residency(host, BASE, PLACE_BYTES, places, ResidencyRules(queue_places=512))
    plain._fused = None
    held = torch.randperm(places, generator=generator)[: rows * experts].to(DEVICE)
    plain._owner[:-1] = BANNED
    plain._owner[held] = torch.arange(rows * experts, device=DEVICE)
    plain.address.copy_((BASE + held * PLACE_BYTES).view(rows, experts))
    plain._owner[torch.nonzero(plain.owner == BANNED).flatten()[::2]] = FREE
    plain._uses[:-1] = torch.randint(0, 40, (rows * experts,), generator=generator).to(DEVICE) / 8
    plain._seen[:-1] = torch.randint(0, 3, (rows * experts,), generator=generator).to(DEVICE)
    other = copy.deepcopy(plain)
    plain.begin_step(4, 1)
    kernels_over(other).begin_step(4, 1)
    compare(plain, other, "at the start")
    assert int((plain.owner[plain._queue] == FREE).sum()) == 62
    assert not plain.audit()


def test_the_running_check_of_a_gpu_finds_a_changed_word_and_names_its_owner() -> None:
    rows, experts, places, size = 2, 3, 5, 20480
    blocks = torch.randint(0, 256, (rows, experts, size), dtype=torch.uint8).to(DEVICE)
    hashes, grid = hash_blocks(blocks), torch.zeros(places, size + 128, dtype=torch.uint8, device=DEVICE)
    residency = Residency(torch.zeros(rows, experts, dtype=torch.int64, device=DEVICE), BASE, 128, places)
    for place, flat in ((0, 4), (2, 1), (3, 5)):
        residency.owner[place] = flat
        grid[place, :size] = blocks.view(-1, size)[flat]
    check = ResidencyCheck(residency, grid, hashes, [size] * rows, places)
    check.step_fused()
    assert check.found.tolist() == [0, 0, 0]
    grid[3, size - 1] ^= 1
    check.step_fused()
    assert check.found.tolist() == [1, 1, 2]
    grid[2, 8] ^= 1
    check.step_fused()
    assert check.found.tolist() == [3, 1, 2], "the first one stays named"
    check.check(torch.arange(places, device=DEVICE))
    assert int(check.found[0]) == 5


@pytest.mark.parametrize("programs", [0, 1, 5])
def test_a_gather_brings_what_has_a_target_and_nothing_else(programs: int) -> None:
    experts, size = 11, 17 * 1024 + 128
    blocks = torch.randint(0, 256, (experts, size), dtype=torch.uint8).to(DEVICE)
    kept = torch.full((experts, size), 7, dtype=torch.uint8, device=DEVICE)
    table = blocks.data_ptr() + torch.arange(experts, device=DEVICE) * size
    targets = torch.zeros_like(table)
    residency_gather.gather(table, targets, size, programs)
    assert bool((kept == 7).all())
    for expert, place in ((2, 9), (5, 0), (10, 4)):
        targets[expert] = kept.data_ptr() + place * size
    residency_gather.gather(table, targets, size, programs)
    assert [torch.equal(kept[place], blocks[expert]) for expert, place in ((2, 9), (5, 0), (10, 4))] == [
        True
    ] * 3
    assert int((kept == 7).all(1).sum()) == experts - 3


def test_a_gather_is_launched_with_no_more_programs_than_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(residency_gather, "_gather", Launches())
    none = torch.zeros(128, dtype=torch.int64, device=DEVICE)
    for programs in (16, 0):
        residency_gather.gather(none, none, 1 << 22, programs)
    assert grids[0] == (16,)
    assert grids[1][0] > 0
