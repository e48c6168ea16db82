"""Random acts on ledgers of two, three and four groups; after each, audit, conservation of bytes, and true content."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from memory.api import PlaceRange
from tests.memory.geometries import mixed_specs, small_ledger
from tests.memory.world import World

PROMPT = [token % 3 for token in range(512)]
"""Prompts begin with parts of this, so that prefixes are shared."""

WEIGHTS = {
    "step": 8, "retire": 2, "release": 3, "retract_half": 1, "checkpoint": 3, "pin": 1, "unpin": 2, "shed": 1,
    "ban": 1, "allow": 1,
}  # fmt: skip
ACTS = [kind for kind, weight in WEIGHTS.items() for _ in range(weight)]


class LedgerMachine(RuleBasedStateMachine):
    """One ledger, one device, up to two steps in flight."""

    @initialize(
        num_kinds=st.integers(2, 4),
        page_tokens=st.sampled_from([1, 16, 64, 128]),
        window=st.sampled_from([5, 40, 130]),
        arena_kb=st.sampled_from([24, 64, 160]),
        place_bytes=st.sampled_from([0, 512, 2048]),
        cached=st.booleans(),
        host_kb=st.sampled_from([0, 0, 8, 40]),
        split=st.sampled_from([False, False, False, True]),
        budget=st.sampled_from([0, 2048, 16384]),
        urgent=st.sampled_from([1024, 1 << 30]),
        seed=st.integers(0, 2**16),
    )
    def build(
        self,
        num_kinds: int,
        page_tokens: int,
        window: int,
        arena_kb: int,
        place_bytes: int,
        cached: bool,
        host_kb: int,
        split: bool,
        budget: int,
        urgent: int,
        seed: int,
    ) -> None:
        specs = mixed_specs(num_kinds, page_tokens, window)
        arena_bytes = arena_kb * 1024
        self.ledger = small_ledger(
            specs,
            arena_bytes,
            place_bytes=place_bytes,
            floor_places=2 if place_bytes else 0,
            cached=cached,
            host_bytes=host_kb * 1024,
            host_budget_bytes=8192,
            mode="split" if split else "arena",
            move_budget_bytes=budget,
            urgent_budget_bytes=urgent,
        )
        dice = random.Random(seed)
        self.world = World(self.ledger, arena_bytes, place_bytes, lambda: dice.random() < 0.5)
        self.rings: list[PlaceRange] = []

    @rule(kind=st.sampled_from(ACTS), data=st.data())
    def act(self, kind: str, data: st.DataObject) -> None:
        """One act; one rule for all, so that their weights are ours."""
        getattr(self, f"_{kind}")(data)

    def _step(self, data: st.DataObject) -> None:
        world = self.world
        depth = data.draw(st.sampled_from([1, 2, 2]))
        while len(world.device.queue) >= depth:
            world.finish_step()
        chunk = data.draw(st.sampled_from([1, 64, 64, 16]))
        admit = []
        for _ in range(data.draw(st.sampled_from([0, 0, 1, 1, 2, 4]))):
            shared = data.draw(st.sampled_from([0, 64, 128, 256]))
            own = data.draw(st.sampled_from([2, 30, 70, 130, 260]))
            base = 1000 * data.draw(st.integers(1, 3))
            tokens = PROMPT[:shared] + list(range(base, base + own))
            if self.ledger.can_ever_grant(len(tokens)) is None:
                admit.append((tokens, data.draw(st.sampled_from([64, 64, 16]))))
        world.plan(dict.fromkeys(world.running, chunk), admit)

    def _retire(self, data: st.DataObject) -> None:
        if self.world.device.queue:
            self.world.finish_step()

    def _running(self, data: st.DataObject) -> int | None:
        numbers = sorted(self.world.running)
        return data.draw(st.sampled_from(numbers)) if numbers else None

    def _release(self, data: st.DataObject) -> None:
        if (number := self._running(data)) is not None:
            self.world.release(number, donate=data.draw(st.booleans()))

    def _retract_half(self, data: st.DataObject) -> None:
        for number in sorted(self.world.running)[1::2]:
            self.world.release(number, donate=data.draw(st.booleans()))

    def _checkpoint(self, data: st.DataObject) -> None:
        for number, request in self.world.running.items():
            if request.num_computed and request.num_computed % 64 == 0:
                self.ledger.checkpoint(number, request.tokens, request.num_computed, rolling=number % 2 == 0)

    def _pin(self, data: st.DataObject) -> None:
        if (number := self._running(data)) is not None:
            self.world.pin(number)

    def _unpin(self, data: st.DataObject) -> None:
        if self.world.pins:
            self.world.unpin(data.draw(st.sampled_from(self.world.pins)))

    def _shed(self, data: st.DataObject) -> None:
        num_bytes = data.draw(st.sampled_from([256, 4096, None]))
        if num_bytes is None:
            self.ledger.flush()
        else:
            self.ledger.shed({spec.name: num_bytes for spec in self.world.specs})

    def _ban(self, data: st.DataObject) -> None:
        ring = self.ledger.take_ring(data.draw(st.integers(1, 6)))
        if ring is not None:
            self.rings.append(ring)

    def _allow(self, data: st.DataObject) -> None:
        if self.rings:
            self.ledger.return_ring(self.rings.pop())

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Nothing is lost: when all have gone, every byte is free, and the longest request that may come fits."""
        if not hasattr(self, "world"):
            return
        world, ledger = self.world, self.ledger
        world.finish_all()
        for number in list(world.running):
            world.release(number, donate=False)
        for pinned in list(world.pins):
            world.unpin(pinned)
        while self.rings:
            ledger.return_ring(self.rings.pop())
        world.check()
        longest = max((n for n in (1, 64, 512, 2048) if ledger.can_ever_grant(n) is None), default=0)
        if longest:
            self._fits_alone(longest)
        ledger.shed({spec.name: world.arena_bytes for spec in world.specs})
        world.plan({})
        world.finish_all()
        world.check()
        for kind in ledger.headroom().kinds.values():
            left = (kind.reclaimable_bytes, kind.pending_bytes, kind.pinned_bytes, kind.used_bytes)
            assert left == (0, 0, 0, 0), f"bytes are lost: {kind}"

    def _fits_alone(self, num_tokens: int) -> None:
        """A request that ``can_ever_grant`` let in gets its room once it is alone, whatever is cached or matched."""
        world, number = self.world, -1
        tokens = (PROMPT[:256] + [7] * num_tokens)[:num_tokens]
        for _ in range(num_tokens // 64 + 400):  # a tiny budget of urgent moves takes many steps
            if number < 0:
                number = next(iter(world.plan({}, [(tokens, 64)])), -1)
            else:
                world.plan({number: 64})
            world.finish_all()
            if number >= 0 and world.running[number].num_computed == num_tokens:
                world.release(number, donate=False)
                return
        raise AssertionError(f"a request of {num_tokens} tokens starves in an empty arena")


# A failure is printed as found: shrinking walks of fifty acts takes minutes.
_SETTINGS = settings(
    max_examples=125,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

TestLedgerMachine = pytest.mark.slow(pytest.mark.timeout(600)(LedgerMachine.TestCase))
TestLedgerMachine.settings = _SETTINGS


@pytest.mark.soak
@pytest.mark.parametrize("part", range(22))
def test_two_hundred_thousand_acts(part: int) -> None:
    """In parts, since a run's record of draws grows with it."""
    run_state_machine_as_test(
        LedgerMachine, settings=settings(_SETTINGS, max_examples=200, derandomize=False)
    )
