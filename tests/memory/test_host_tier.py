"""The host tier's slots: budget shared between kinds, least recently used first out, pins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.api import LedgerError
from memory.ledger.host_tier import HostTier

SIZES = {"full": 30, "window": 10, "state": 100}


def test_kinds_of_any_size_share_one_budget() -> None:
    tier = HostTier(250, SIZES)
    assert tier.budget_bytes == 200
    slots = [tier.store("full", i) for i in range(6)]
    assert [tier.address("full", stored.slot) for stored in slots] == [0, 30, 60, 100, 130, 160]
    assert tier.find("full", 0) == 0
    # The state takes the slab whose last use lies furthest back: pages 3 to 5, since page 0 was just used.
    stored = tier.store("state", 77)
    assert {page.virtual for page in stored.evicted} == {3, 4, 5}
    assert tier.address("state", stored.slot) == 100
    assert tier.used_bytes == 190


def test_least_recently_used_of_the_own_kind_goes_first() -> None:
    tier = HostTier(100, {"full": 25})
    for i in range(4):
        tier.store("full", i)
    tier.find("full", 0)
    assert [page.virtual for page in tier.store("full", 9).evicted] == [1]


def test_pinned_pages_stay_and_shortage_is_an_answer() -> None:
    tier = HostTier(100, SIZES)
    tier.store("full", 1)
    tier.pin("full", 1)
    assert tier.store("state", 2) is None
    with pytest.raises(LedgerError, match="pinned"):
        tier.drop("full", 1)
    tier.unpin("full", 1)
    assert tier.store("state", 2).evicted[0].virtual == 1
    assert tier.find("full", 1) is None


def test_a_pinned_oldest_page_is_passed_over() -> None:
    tier = HostTier(100, {"full": 25})
    for i in range(4):
        tier.store("full", i)
    tier.pin("full", 0)
    assert [page.virtual for page in tier.store("full", 9).evicted] == [1]


def test_misuse_raises() -> None:
    tier = HostTier(100, SIZES)
    tier.store("full", 1)
    with pytest.raises(LedgerError, match="already"):
        tier.store("full", 1)
    for misuse in (tier.drop, tier.pin, tier.unpin):
        with pytest.raises(LedgerError):
            misuse("full", 2)
    with pytest.raises(LedgerError, match="not pinned"):
        tier.unpin("full", 1)


def test_no_budget_stores_nothing() -> None:
    assert HostTier(0, SIZES).store("full", 1) is None


ACTION = st.tuples(
    st.sampled_from(["store", "find", "drop", "pin", "unpin"]),
    st.sampled_from(sorted(SIZES)),
    st.integers(0, 12),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ACTION, max_size=60), st.integers(0, 5))
def test_random_use_keeps_the_books(actions: list[tuple[str, str, int]], slabs: int) -> None:
    tier = HostTier(slabs * 100, SIZES)
    here: dict[tuple[str, int], int] = {}
    pins: dict[tuple[str, int], int] = {}
    for action, group, virtual in actions:
        key = (group, virtual)
        if action == "store" and key not in here:
            stored = tier.store(group, virtual)
            if stored is None:
                # Refused only where no slab could be emptied: each has a pinned page, or there is none.
                pinned_slabs = {tier.address(*k[:1], here[k]) // 100 for k, count in pins.items() if count}
                assert len(pinned_slabs) == slabs
                continue
            for page in stored.evicted:
                assert not pins.get((page.group, page.virtual))
                assert here.pop((page.group, page.virtual)) == page.slot
            here[key] = stored.slot
        elif action == "find":
            assert tier.find(group, virtual) == here.get(key)
        elif action == "drop" and key in here and not pins.get(key):
            tier.drop(group, virtual)
            del here[key]
        elif action == "pin" and key in here:
            tier.pin(group, virtual)
            pins[key] = pins.get(key, 0) + 1
        elif action == "unpin" and pins.get(key):
            tier.unpin(group, virtual)
            pins[key] -= 1
        tier.audit()
        assert tier.used_bytes == sum(SIZES[name] for name, _ in here) <= tier.budget_bytes
