"""What every ledger answers alike while memory is ample: the scheduler may be given either."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from memory.api import Grant, Ledger, PageAsk, PageKind, PageSpec, Shortage
from memory.ledger.ledger import ArenaLedger
from tests.helpers.free_lists import FreeListLedger
from tests.memory.geometries import mixed_specs

ARENA = 1 << 20
Maker = Callable[[Sequence[PageSpec]], Ledger]
MAKERS: dict[str, Maker] = {
    "arena": lambda specs: ArenaLedger(specs, ARENA, max_chunk_tokens=64),
    "split": lambda specs: ArenaLedger(specs, ARENA, mode="split", max_chunk_tokens=64),
    "experts": lambda specs: ArenaLedger(
        specs, ARENA, expert_place_bytes=4096, floor_places=8, max_chunk_tokens=64
    ),
}


def _answers(ledger: Ledger, num_kinds: int) -> list[object]:
    """Everything visible of a fixed walk of asks and releases, but the ids."""
    dice = random.Random(num_kinds)
    computed: dict[int, int] = {}
    seen: list[object] = []
    for step in range(1, 60):
        ledger.begin_step(step, max(0, step - 2))
        for request in range(8):
            if request in computed and dice.random() < 0.1:
                ledger.release(request)
                del computed[request]
                continue
            before = computed.get(request, 0)
            after = before + dice.choice([1, 16, 64])
            if ledger.capacity_tokens(request) < after:
                answer = ledger.grant(PageAsk(request, after, before))
                assert isinstance(answer, Grant), answer
                seen.append(
                    sorted((growth.group, growth.first, len(growth.pages)) for growth in answer.growth)
                )
            computed[request] = after
            for name in ledger.specs:
                run = ledger.pages(request, name)
                seen.append((request, name, run.first, len(run.pages)))
            seen.append((ledger.capacity_tokens(request) >= after, ledger.release_bytes(request)))
        held = [ledger.pages(request, name) for request in computed for name in ledger.specs]
        assert all(len(set(run.pages)) == len(run.pages) for run in held)
        ledger.commit_step(step)
        ledger.end_step(step - 1)
        ledger.audit()
    return seen


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_every_ledger_grants_the_same_pages(name: str, num_kinds: int) -> None:
    specs = mixed_specs(num_kinds, 16, 40)
    simple = FreeListLedger(specs, ARENA, max_running=32, max_chunk_tokens=64)
    assert _answers(MAKERS[name](specs), num_kinds) == _answers(simple, num_kinds)


@pytest.mark.parametrize("name", MAKERS)
def test_every_ledger_says_no_with_bytes(name: str) -> None:
    specs = mixed_specs(3, 16, 40)
    ledger = MAKERS[name](specs)
    assert ledger.can_ever_grant(64) is None
    never = ledger.can_ever_grant(10**7)
    assert never is not None
    assert never.never
    assert sum(never.missing_bytes.values()) > ARENA // 2
    ledger.begin_step(1, 0)
    short = ledger.grant(PageAsk(1, 10**7))
    assert isinstance(short, Shortage)
    assert sum(short.missing_bytes.values()) > 0
    assert all(spec.kind is not PageKind.EXPERT for spec in specs)
    assert ledger.headroom().arena_bytes == ARENA
