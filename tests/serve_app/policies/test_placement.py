"""Which replica gets a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from memory.api import KindHeadroom
from serve_app.policies.placement import (
    VETOED,
    Busy,
    Choice,
    Outcome,
    Placement,
    PlacementConfig,
    RequestFacts,
    with_fleet_mean,
)
from serve_app.policies.prediction import CostModel
from serve_app.policies.prefix_affinity import block_hashes
from serve_app.policies.replica_view import ReplicaLoad
from tests.serve_app.policies.builders import residency, snapshot

COSTS = CostModel(prefill_tokens_per_s=1_000.0, decode_ms_per_active=0.5)
CONFIG = PlacementConfig(costs=COSTS, block_tokens=4)
LONG = RequestFacts(num_prompt_tokens=200, max_tokens=50)


def placement_with(config: PlacementConfig = CONFIG, **replicas: dict[str, Any]) -> Placement:
    placement = Placement(config, seed=1)
    for name, numbers in replicas.items():
        placement.report(name, snapshot(1, 0.0, **numbers), 0.0)
    return placement


def chosen(answer: Choice | Busy) -> str:
    assert isinstance(answer, Choice), answer
    return answer.replica_id


def facts(tokens: list[int], *keys: str) -> RequestFacts:
    return RequestFacts(len(tokens), 50, block_hashes(tokens, block_tokens=4), keys)


FULL = KindHeadroom(used_bytes=10_000)


@pytest.mark.parametrize(
    ("a", "b", "winner"),
    [
        ({"running": 30}, {"running": 2}, "b"),  # crowding of decode
        ({"waiting_tokens": 50}, {"waiting_tokens": 4_000, "waiting": 1}, "a"),  # prefill before it
        ({"gap_bytes": 1_000}, {"gap_bytes": 1 << 40, "running": 4}, "b"),  # headroom
        ({"running": 64}, {"running": 63}, "b"),  # no row free
        ({"draining": True}, {"running": 60}, "b"),
    ],
)
def test_the_cheaper_replica_wins(a: dict[str, Any], b: dict[str, Any], winner: str) -> None:
    costs = CostModel(prefill_tokens_per_s=1_000.0, decode_ms_per_active=0.5, kv_bytes_per_token=100.0)
    for _ in range(5):
        placement = placement_with(PlacementConfig(costs=costs, block_tokens=4), a=a, b=b)
        assert chosen(placement.choose(LONG, 0.0)) == winner


def test_a_conversation_returns_to_its_prefix() -> None:
    placement = placement_with(a={}, b={}, c={}, d={})
    prompt = list(range(400))
    first = placement.choose(facts(prompt, "conversation"), 0.0)
    assert isinstance(first, Choice)
    placement.done(first.ticket, 1.0, Outcome(True, 0, 20))
    again = placement.choose(facts([*prompt, *range(1_000, 1_100)], "conversation"), 1.0)
    assert isinstance(again, Choice)
    assert again.replica_id == first.replica_id
    assert again.hit_tokens == 396
    assert again.terms.prefill == pytest.approx(104.0)


def test_a_hot_prefix_spills_over_before_its_replica_drowns() -> None:
    placement = placement_with(a={}, b={}, c={}, d={})
    prompt = list(range(200))
    shares = Counter(
        chosen(placement.choose(facts([*prompt, *range(1_000 * i, 1_000 * i + 100)]), 0.0))
        for i in range(1, 41)
    )
    assert max(shares.values()) <= 16


def test_a_burst_under_one_snapshot_does_not_stampede_the_idle_replica() -> None:
    replicas = {f"r{i}": {"running": 12} for i in range(7)}
    # The prediction alone, without the bound on shares behind it.
    config = PlacementConfig(costs=COSTS, block_tokens=4, most_share=100.0)
    placement = placement_with(config, **replicas, idle={})
    shares = Counter(chosen(placement.choose(LONG, 0.5)) for _ in range(80))
    assert shares["idle"] <= 2.5 * 80 / 8
    assert len(shares) == 8


def test_no_replica_gets_more_than_its_bound_of_the_latest_placements() -> None:
    """Whatever the prediction says: here a prefix that everybody shares, and all others are three times as slow."""
    replicas = {f"r{i}": {} for i in range(8)}
    placement = placement_with(PlacementConfig(costs=COSTS, block_tokens=4, most_share=2.0), **replicas)
    prompt = list(range(1_000))
    first = placement.choose(facts(prompt), 0.0)
    assert isinstance(first, Choice)
    placement.done(first.ticket, 0.1, Outcome(True))
    shares: Counter[str] = Counter()
    for i in range(160):
        now_s = 0.1 + i * 0.01
        answer = placement.choose(facts([*prompt, i]), now_s)
        shares[chosen(answer)] += 1
        assert isinstance(answer, Choice)
        placement.done(answer.ticket, now_s, Outcome(True))
    assert first.replica_id in shares
    assert max(shares.values()) <= 2.0 * 160 / 8 + 32  # the first 32 placements are free


def test_near_ties_are_drawn() -> None:
    firsts = Counter(_first_of_equals(seed) for seed in range(60))
    assert set(firsts) == {"a", "b", "c"}


def _first_of_equals(seed: int) -> str:
    placement = Placement(CONFIG, seed=seed)
    for name in ("a", "b", "c"):
        placement.report(name, snapshot(1), 0.0)
    return chosen(placement.choose(LONG, 0.0))


@pytest.mark.parametrize("others_running", [0, 1, 40])
def test_a_conversation_stays_within_the_band(others_running: int) -> None:
    for seed in range(10):
        placement = Placement(PlacementConfig(costs=COSTS, block_tokens=4, stay_ms=90.0), seed)
        placement.report("home", snapshot(1), 0.0)
        first = placement.choose(facts([1, 2, 3], "conversation"), 0.0)
        assert isinstance(first, Choice)
        placement.done(first.ticket, 0.1, Outcome(True))
        placement.report("home", snapshot(2, 0.1, running=2, submitted=1, finished=1), 0.1)
        placement.report("other", snapshot(1, 0.1, running=others_running), 0.1)
        assert chosen(placement.choose(facts([9, 9, 9], "conversation"), 0.1)) == "home"


def test_a_conversation_leaves_a_home_outside_the_band() -> None:
    placement = Placement(PlacementConfig(costs=COSTS, block_tokens=4, stay_ms=60.0), 0)
    placement.report("home", snapshot(1), 0.0)
    first = placement.choose(facts([1, 2, 3], "conversation"), 0.0)
    assert isinstance(first, Choice)
    placement.report("home", snapshot(2, 0.1, running=30, submitted=1), 0.1)
    placement.report("other", snapshot(1, 0.1), 0.1)
    assert chosen(placement.choose(facts([9, 9, 9], "conversation"), 0.1)) == "other"


def test_a_veto_excludes_and_gives_the_booking_back() -> None:
    placement = placement_with(a={}, b={"running": 8})
    first = placement.choose(facts(list(range(50))), 0.0)
    assert isinstance(first, Choice)
    assert first.replica_id == "a"
    placement.done(first.ticket, 0.0, VETOED)
    assert placement.views["a"].num_own == 0
    assert placement.prefixes.num_blocks("a") == 0
    assert chosen(placement.choose(facts(list(range(50))), 0.0, exclude={"a"})) == "b"
    assert isinstance(placement.choose(LONG, 0.0, exclude={"a", "b"}), Busy)


def test_dead_and_removed_replicas_get_nothing() -> None:
    placement = placement_with(a={}, b={"running": 20})
    placement.report("b", snapshot(2, 4.0, running=20), 4.0)
    assert chosen(placement.choose(LONG, 5.5)) == "b"
    placement.remove("b")
    assert isinstance(placement.choose(LONG, 5.5), Busy)


def test_an_aged_replica_is_taken_for_an_average_one_and_not_for_an_idle_one() -> None:
    placement = placement_with(aged={}, b={}, c={})
    for name in ("b", "c"):
        placement.report(name, snapshot(2, 4.5, running=12), 4.5)
    # Taken for idle it would get the first eight.
    shares = Counter(chosen(placement.choose(LONG, 4.5)) for _ in range(8))
    assert shares["aged"] <= 4


def test_a_replica_without_a_report_is_tried_and_not_flooded() -> None:
    placement = placement_with(a={"running": 10}, b={"running": 10})
    placement.add("new", 0.0)
    shares = Counter(chosen(placement.choose(LONG, 0.0)) for _ in range(30))
    assert 3 <= shares["new"] <= 15


def test_a_lone_replica_without_a_report_gets_the_first_request() -> None:
    placement = Placement(CONFIG)
    assert isinstance(placement.choose(LONG, 0.0), Busy)
    placement.add("new", 0.0)
    assert chosen(placement.choose(LONG, 100.0)) == "new"


def test_full_replicas_mean_busy_with_a_time_to_retry() -> None:
    placement = placement_with(a={"running": 4, "waiting": 3, "max_running": 4})
    assert chosen(placement.choose(LONG, 0.0)) == "a"
    answer = placement.choose(LONG, 0.0)
    assert isinstance(answer, Busy)
    assert 0.1 <= answer.retry_after_s <= 30.0


def test_out_of_order_reports_change_nothing() -> None:
    placement = placement_with(a={}, b={})
    assert placement.report("a", snapshot(9, 1.0, running=40), 1.0)
    assert not placement.report("a", snapshot(8, 0.9), 1.0)
    placement.report("b", snapshot(2, 1.0), 1.0)
    assert chosen(placement.choose(LONG, 1.0)) == "b"


def test_leaked_tickets_expire() -> None:
    placement = placement_with(a={})
    answer = placement.choose(LONG, 0.0)
    assert isinstance(answer, Choice)
    assert placement.expire(899.0) == 0
    assert placement.expire(901.0) == 1
    assert placement.num_open == 0
    assert placement.views["a"].num_own == 0
    placement.done(answer.ticket, 902.0, Outcome(True))  # late, and ignored


def test_a_prefix_found_gone_is_no_longer_counted_on() -> None:
    placement = placement_with(a={})
    old, older = list(range(100)), list(range(500, 600))
    for prompt in (older, old):
        answer = placement.choose(facts(prompt), 0.0)
        assert isinstance(answer, Choice)
        placement.done(answer.ticket, 0.5, Outcome(True, 0, 10))
    answer = placement.choose(facts(old), 1.0)
    assert isinstance(answer, Choice)
    assert answer.hit_tokens == 96
    placement.done(answer.ticket, 1.5, Outcome(True, cached_tokens=0, generated_tokens=10))
    answer = placement.choose(facts(older), 2.0)
    assert isinstance(answer, Choice)
    assert answer.hit_tokens == 0


def test_a_flushed_prefix_cache_empties_the_map() -> None:
    costs = CostModel(prefill_tokens_per_s=1_000.0, kv_bytes_per_token=100.0)
    config = PlacementConfig(costs=costs, block_tokens=4)
    placement = placement_with(config, a={"full": KindHeadroom(used_bytes=0)})
    answer = placement.choose(facts(list(range(100))), 0.0)
    assert isinstance(answer, Choice)
    held = KindHeadroom(reclaimable_bytes=10_000)
    placement.report("a", snapshot(2, 0.5, submitted=1, full=held), 0.5)
    assert placement.prefixes.num_blocks("a") == 24
    placement.report("a", snapshot(3, 0.6, submitted=1, full=KindHeadroom()), 0.6)
    assert placement.prefixes.num_blocks("a") <= 1


HALF_A, HALF_B = b"\xff\x00", b"\x00\xff"
EXPERTS = PlacementConfig(
    costs=CostModel(prefill_tokens_per_s=1_000.0, expert_bytes=1e9, link_bytes_per_s=50e9), block_tokens=4
)


def _learned(config: PlacementConfig, seed: int = 1) -> Placement:
    placement = Placement(config, seed)
    placement.report("a", snapshot(1, experts=residency(HALF_A, 1)), 0.0)
    placement.report("b", snapshot(1, experts=residency(HALF_B, 1)), 0.0)
    placement.report("c", snapshot(1), 0.0)
    for _ in range(6):
        answer = placement.choose(facts([1, 2, 3], "tenant"), 0.0)
        assert isinstance(answer, Choice)
        placement.done(answer.ticket, 0.0, Outcome(True, used_expert_bits=HALF_A))
    return placement


def test_a_tenant_goes_where_its_experts_are() -> None:
    placement = _learned(EXPERTS)
    for i in range(3):
        answer = placement.choose(facts([7, 8, 9], f"another {i}", "tenant"), 0.0, exclude={"c"})
        assert isinstance(answer, Choice)
        assert answer.replica_id == "a"
        assert answer.terms.experts == pytest.approx(0.0)
        placement.done(answer.ticket, 0.0, Outcome(True, used_expert_bits=HALF_A))


def test_a_tie_goes_where_the_fewest_experts_are_missing_however_cheap_they_are() -> None:
    cheap = CostModel(prefill_tokens_per_s=1_000.0, expert_bytes=1.0)
    config = PlacementConfig(costs=cheap, block_tokens=4)
    for seed in range(12):
        placement = _learned(config, seed)
        assert chosen(placement.choose(facts([7, 8, 9], "new", "tenant"), 0.0, {"c"})) == "a"


def test_what_was_used_decides_and_not_what_was_resident_where_it_ran() -> None:
    placement = placement_with(
        EXPERTS, a={"experts": residency(HALF_A, 1)}, b={"experts": residency(HALF_B, 1)}
    )
    for domain, used, elsewhere in (("left", HALF_A, "a"), ("right", HALF_B, "b")):
        for _ in range(4):  # each ran where the other's experts lie
            answer = placement.choose(facts([1, 2, 3], f"{domain} before", domain), 0.0, exclude={elsewhere})
            assert isinstance(answer, Choice)
            placement.done(answer.ticket, 0.0, Outcome(True, used_expert_bits=used))
    assert chosen(placement.choose(facts([4], "new left", "left"), 1.0)) == "a"
    assert chosen(placement.choose(facts([4], "new right", "right"), 1.0)) == "b"


def test_residency_does_not_blur_what_is_known_of_use() -> None:
    placement = placement_with(EXPERTS, a={"experts": residency(b"\xff\xff", 1)})

    def end(tenant: str, used: bytes | None) -> None:
        answer = placement.choose(facts([1, 2, 3], tenant), 0.0)
        assert isinstance(answer, Choice)
        placement.done(answer.ticket, 0.0, Outcome(True, used_expert_bits=used))

    for used in (HALF_A, HALF_A, HALF_A, None, None, None, None, None):
        end("told", used)
        end("untold", None)
    told, untold = (placement.experts.profile([tenant]) for tenant in ("told", "untold"))
    assert told is not None
    assert untold is not None
    assert placement.experts.expected_misses(told, HALF_A) == 0
    assert placement.experts.expected_misses(untold, HALF_A) > 0, "of it nothing better is known"


def test_a_tenant_that_lost_its_home_settles_where_its_experts_are() -> None:
    cheap = CostModel(prefill_tokens_per_s=1_000.0, expert_bytes=1.0)
    placement = Placement(PlacementConfig(costs=cheap, block_tokens=4), seed=1)
    for name, bits in (("a", HALF_A), ("b", HALF_B), ("c", HALF_A)):
        placement.report(name, snapshot(1, experts=residency(bits, 1)), 0.0)
    numbers = iter(range(100))

    def settle(tenant: str, used: bytes, others: set[str]) -> str:
        for _ in range(4):
            answer = placement.choose(facts([1], f"{tenant} {next(numbers)}", tenant), 0.0, exclude=others)
            assert isinstance(answer, Choice)
            placement.done(answer.ticket, 0.0, Outcome(True, used_expert_bits=used))
        return answer.replica_id

    assert settle("left", HALF_A, {"b", "c"}) == "a"
    assert settle("right", HALF_B, {"a", "c"}) == "b"
    assert [settle(name, HALF_A, {"a", "b"}) for name in ("one", "two")] == ["c", "c"]
    placement.remove("a")
    # The fewest are at home on b, but what it uses is on c.
    assert settle("left", HALF_A, set()) == "c"


def test_without_a_report_of_use_the_residency_at_the_end_is_learned_from() -> None:
    placement = placement_with(EXPERTS, a={"experts": residency(HALF_A, 1)})
    for _ in range(6):
        answer = placement.choose(facts([1, 2, 3], "tenant"), 0.0)
        assert isinstance(answer, Choice)
        placement.done(answer.ticket, 0.0, Outcome(True))
    profile = placement.experts.profile(["tenant"])
    assert profile is not None
    assert placement.experts.expected_misses(profile, HALF_A) == 0
    assert placement.experts.expected_misses(profile, HALF_B) > 6


def test_a_replica_that_reports_no_experts_is_taken_for_an_average_one() -> None:
    placement = _learned(EXPERTS)
    terms = {}
    for exclude in ({"b", "c"}, {"a", "c"}, {"a", "b"}):
        answer = placement.choose(facts([7, 8, 9], "another", "tenant"), 0.0, exclude)
        assert isinstance(answer, Choice)
        terms[answer.replica_id] = answer.terms.experts
        placement.done(answer.ticket, 0.0, VETOED)
    # Its eight experts of 1 GB over 50 GB/s.
    assert terms["a"] == 0.0
    assert terms["b"] == pytest.approx(160.0, rel=0.2)
    assert terms["c"] == pytest.approx(terms["b"] / 2)


def test_a_busy_link_makes_the_missing_count_more() -> None:
    placement = _learned(EXPERTS)
    before = placement.choose(facts([7, 8, 9], "another", "tenant"), 0.0, {"a", "c"})
    for sequence in range(2, 200):
        placement.report(
            "b",
            replace(
                snapshot(sequence, 0.0, running=4 + sequence % 4, experts=residency(HALF_B, 1)),
                step_s=0.01 * (4 + sequence % 2),
                expert_bytes_paged=int(5e9) * sequence,
            ),
            0.0,
        )
    after = placement.choose(facts([7, 8, 9], "another", "tenant"), 0.0, {"a", "c"})
    assert isinstance(before, Choice)
    assert isinstance(after, Choice)
    assert after.terms.experts > 5 * before.terms.experts


def test_costs_that_a_worker_reports_replace_the_start_values() -> None:
    extra = {"kv_bytes_per_token": 1_000.0, "unknown": 3.0}
    placement = placement_with(a={"gap_bytes": 1_000, "extra": extra}, b={"running": 4})
    assert chosen(placement.choose(LONG, 0.0)) == "b"


def test_the_fleet_mean_raises_the_untrusted_and_never_lowers() -> None:
    def load(trust: float, active: float) -> ReplicaLoad:
        return ReplicaLoad(trust, active, active, 64, active * 10, 1e9)

    new = ReplicaLoad(0.0, 2, 0, 0, 20, None)
    blended = with_fleet_mean(
        {"a": load(1, 10), "b": load(1, 20), "c": load(0.5, 5), "d": load(0, 40), "e": new}
    )
    assert [blended[name].num_active for name in "abcde"] == [10, 20, 10, 40, 12]
    assert blended["c"].backlog_tokens == 100
    assert with_fleet_mean({"a": load(0, 3)})["a"].num_active == 3


def test_without_expert_affinity_missing_experts_count_for_nothing() -> None:
    first: dict[bool, list[str]] = {True: [], False: []}
    for wanted, seed in ((wanted, seed) for wanted in first for seed in range(12)):
        config = PlacementConfig(costs=CostModel(expert_bytes=1e7), expert_affinity=wanted)
        placement = Placement(config, seed=seed)
        for name, bits in (("a", b"\xff" * 8), ("b", b"\x00" * 8)):
            experts = residency(bits, 1, None, 2, 32)
            placement.report(name, snapshot(1, extra={"expert_bytes": 1e7}, experts=experts), 0.0)
        for _ in range(3):
            placement.experts.observe(["tenant"], b"\xff" * 8)
        choice = placement.choose(RequestFacts(100, 10, (), ("chat", "tenant")), 0.0)
        first[wanted].append(chosen(choice))
    assert set(first[True]) == {"a"}
    assert set(first[False]) == {"a", "b"}


def test_an_expert_cache_that_is_not_full_is_no_reason_to_stay_away() -> None:
    costs = CostModel(expert_bytes=1e7)
    first: dict[int, set[str]] = {0: set(), 64: set()}
    for free, seed in ((free, seed) for free in first for seed in range(12)):
        placement = Placement(PlacementConfig(costs=costs), seed=seed)
        for name, bits in (("warm", b"\xff" * 8), ("cold", b"\x00" * 8)):
            resident = 64 if name == "warm" else 0
            extra = {
                "expert_bytes": 1e7,
                "expert_places": float(resident),
                "experts_resident": float(resident),
            }
            if name == "cold":
                extra |= {"expert_places": 64.0, "experts_resident": 64.0 - free}
            experts = residency(bits, 1, None, 2, 32)
            placement.report(name, snapshot(1, extra=extra, experts=experts), 0.0)
        for _ in range(3):
            placement.experts.observe(["tenant"], b"\xff" * 8)
        first[free].add(chosen(placement.choose(RequestFacts(100, 10, (), ("tenant",)), 0.0)))
    assert first[0] == {"warm"}, "what it would miss there drives others out"
    assert first[64] == {"warm", "cold"}, "all of it finds room"


def test_tenants_whose_experts_are_paged_are_at_home_on_different_replicas() -> None:
    for paged, apart in ((True, True), (False, False)):
        placement = Placement(PlacementConfig(), seed=3)
        for name in "abcd":
            extra = {"expert_bytes": 1e5} if paged else {}
            placement.report(name, snapshot(1, 0.0, extra=extra), 0.0)
        went: dict[str, set[str]] = {f"tenant{n}": set() for n in range(4)}
        for number in range(10):
            for tenant in went:
                now_s = 10.0 * number
                for name in "abcd":
                    placement.report(name, snapshot(number + 2, now_s, extra=extra), now_s)
                choice = placement.choose(RequestFacts(64, 8, (), (f"{tenant}/{number}", tenant)), now_s)
                went[tenant].add(chosen(choice))
                assert isinstance(choice, Choice)
                placement.done(choice.ticket, now_s, Outcome(completed=True))
        homes = [home for where in went.values() for home in where]
        assert (len(homes) == len(set(homes)) == 4) == apart, went


def test_a_busy_home_is_left_for_the_moment_and_a_lost_one_for_good() -> None:
    placement = Placement(PlacementConfig(), seed=3)
    for name in "ab":
        placement.report(name, snapshot(1, 0.0, extra={"expert_bytes": 1e5}), 0.0)

    def place(number: int) -> str:
        return chosen(placement.choose(RequestFacts(64, 8, (), (f"chat{number}", "tenant")), 0.1))

    home = place(1)
    other = next(name for name in "ab" if name != home)
    placement.report(home, snapshot(2, 0.1, running=60, extra={"expert_bytes": 1e5}), 0.1)
    assert place(2) == other
    placement.report(home, snapshot(3, 0.1, extra={"expert_bytes": 1e5}), 0.1)
    placement.remove(other)
    placement.report(other, snapshot(1, 0.1, extra={"expert_bytes": 1e5}), 0.1)
    assert place(3) == home
    placement.remove(home)
    assert place(4) == other
