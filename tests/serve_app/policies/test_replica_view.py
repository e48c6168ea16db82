"""What a Router believes of a replica between snapshots."""

from __future__ import annotations

import pytest

from serve_app.policies.replica_view import Accepted, ReplicaView, SentLoad
from tests.serve_app.policies.builders import residency, snapshot

RATE = 1_000.0


def view_with(**numbers: object) -> ReplicaView:
    view = ReplicaView("a", RATE)
    assert view.accept(snapshot(1, 0.0, **numbers), 0.0) is Accepted.NEW  # type: ignore[arg-type]
    return view


@pytest.mark.parametrize(
    ("age_s", "trust", "dead"),
    [
        (0.0, 1.0, False),
        (1.0, 1.0, False),
        (2.0, 0.75, False),
        (4.9, 0.025, False),
        (5.1, 0.0, True),
    ],
)
def test_trust_falls_with_age_until_the_replica_counts_as_dead(
    age_s: float, trust: float, dead: bool
) -> None:
    view = view_with()
    assert view.trust(age_s) == pytest.approx(trust)
    assert view.is_dead(age_s) is dead


def test_a_replica_that_never_reported_is_unknown_and_not_dead() -> None:
    view = ReplicaView("a", RATE)
    assert view.trust(100.0) == 0.0
    assert not view.is_dead(100.0)
    assert view.load(100.0).available_bytes is None


@pytest.mark.parametrize("sequence", [4, 5])
def test_out_of_order_snapshots_are_dropped(sequence: int) -> None:
    view = view_with()
    view.accept(snapshot(5, 1.0, running=7), 1.0)
    assert view.accept(snapshot(sequence, 0.5, running=1), 1.1) is Accepted.OUT_OF_ORDER
    assert view.load(1.1).num_active == 7


def test_a_dead_view_starts_anew_with_any_sequence() -> None:
    view = view_with()
    view.accept(snapshot(500, 1.0, running=7), 1.0)
    assert view.accept(snapshot(1, 0.0, running=2), 10.0) is Accepted.NEW
    assert view.load(10.0).num_active == 2
    assert view.trust(10.0) == 1.0


def test_a_snapshot_that_was_long_on_its_way_is_old_when_it_arrives() -> None:
    view = ReplicaView("a", RATE)
    view.accept(snapshot(1, 100.0), 7.0)  # the worker's clock is 93 s ahead: an offset, no age
    assert view.age_s(7.0) == pytest.approx(0.0)
    view.accept(snapshot(2, 101.0), 9.5)  # taken at 8.0 on our clock
    assert view.age_s(9.5) == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("drift", [-1e-4, 1e-4])
def test_clocks_that_drift_apart_do_not_look_like_a_delay(drift: float) -> None:
    view = ReplicaView("a", RATE)
    for sequence in range(1, 20_000):
        now_s = 1.0 * sequence
        view.accept(snapshot(sequence, now_s * (1 + drift)), now_s)
    assert view.age_s(now_s) < 0.1


def test_a_clock_set_back_lowers_trust_but_does_not_kill() -> None:
    view = view_with()
    view.accept(snapshot(2, -3600.0), 1.0)
    assert not view.is_dead(1.0)
    assert 0.0 < view.trust(1.0) < 1.0


def test_own_placements_count_until_a_snapshot_contains_them() -> None:
    view = view_with(running=3, submitted=10)
    for ticket in (1, 2):
        view.sent(ticket, SentLoad(500.0, 0.0), 0.1)
    assert view.load(0.1).num_active == 5
    view.accept(snapshot(2, 0.2, running=4, submitted=11), 0.2)  # one of the two has arrived
    assert view.load(0.2).num_active == 5
    view.accept(snapshot(3, 0.3, running=5, submitted=12), 0.3)
    assert view.load(0.3).num_active == 5


def test_a_snapshot_taken_before_a_placement_cannot_contain_it() -> None:
    view = view_with(submitted=0)
    view.accept(snapshot(2, 0.2, submitted=0), 0.2)
    view.sent(1, SentLoad(500.0, 0.0), 0.5)
    view.accept(snapshot(3, 0.4, submitted=3, running=3), 0.7)  # others' requests; taken at 0.4
    assert view.load(0.7).num_active == 4


def test_a_placement_that_never_arrived_is_not_counted_beside_the_snapshot_for_ever() -> None:
    view = view_with()
    view.sent(1, SentLoad(500.0, 0.0), 0.1)
    view.accept(snapshot(2, 6.0, running=2), 6.0)
    assert view.load(6.0).num_active == 2
    assert view.load(6.0).backlog_tokens == 0


def test_what_ended_since_the_snapshot_is_taken_off_once() -> None:
    view = view_with(submitted=0)
    view.sent(1, SentLoad(100.0, 64.0), 0.1)
    view.accept(snapshot(2, 0.2, running=4, submitted=1, gap_bytes=1_000), 0.2)
    view.ended(1)
    assert view.load(0.2).num_active == 3
    assert view.load(0.2).available_bytes == 1_064
    view.accept(snapshot(3, 0.3, running=3, submitted=1, finished=1, gap_bytes=1_064), 0.3)
    assert view.load(0.3).num_active == 3
    assert view.load(0.3).available_bytes == 1_064
    view.ended(1)  # a second end changes nothing
    assert view.load(0.3).num_active == 3


def test_the_backlog_drains_at_the_replicas_rate_and_grows_with_own_placements() -> None:
    view = view_with(waiting_tokens=1_000)
    assert view.load(0.4).backlog_tokens == pytest.approx(600)
    view.sent(1, SentLoad(500.0, 0.0), 0.4)
    assert view.load(0.4).backlog_tokens == pytest.approx(1_100)
    assert view.load(0.9).backlog_tokens == pytest.approx(600)
    view.started(1)
    assert view.load(0.4).backlog_tokens == pytest.approx(600)
    assert view.load(9.0).backlog_tokens == 0


def test_idle_time_is_not_credited_to_later_placements() -> None:
    view = view_with(waiting_tokens=100)
    view.sent(1, SentLoad(500.0, 0.0), 0.9)  # the 100 were done at 0.1; 0.8 s of idling count for nothing
    assert view.load(0.9).backlog_tokens == pytest.approx(500)


def test_own_bytes_in_flight_lower_the_headroom() -> None:
    view = view_with(gap_bytes=1_000)
    view.sent(1, SentLoad(10.0, 700.0), 0.1)
    view.sent(2, SentLoad(10.0, 700.0), 0.1)
    assert view.load(0.1).available_bytes == -400


def test_the_prefill_rate_is_learned_under_a_backlog_only() -> None:
    view = view_with(waiting_tokens=9_000, prompt_tokens=0)
    for tick in range(1, 41):
        view.accept(
            snapshot(1 + tick, tick * 0.5, waiting_tokens=9_000, prompt_tokens=tick * 2_000), tick * 0.5
        )
    assert view.prefill_tokens_per_s == pytest.approx(4_000, rel=0.01)
    for tick in range(41, 61):  # idle: nothing computed says nothing about the rate
        view.accept(snapshot(1 + tick, tick * 0.5, prompt_tokens=80_000), tick * 0.5)
    assert view.prefill_tokens_per_s == pytest.approx(4_000, rel=0.01)


def test_expert_deltas_apply_to_their_base_only() -> None:
    view = view_with(experts=residency(b"\x0f\x00", 1))
    view.accept(snapshot(2, experts=residency(b"\x01\x80", 2, base=1)), 0.1)
    assert view.resident_bits == b"\x0e\x80"
    view.accept(snapshot(3, experts=residency(b"\xff\xff", 4, base=3)), 0.2)  # generation 3 was lost
    assert view.resident_bits == b"\x0e\x80"
    assert not view.resident_is_whole
    view.accept(snapshot(4), 0.3)  # a snapshot without a map leaves it as it is
    assert view.resident_bits == b"\x0e\x80"
    view.accept(snapshot(5, experts=residency(b"\x00\x03", 5)), 0.4)
    assert view.resident_bits == b"\x00\x03"
    assert view.resident_is_whole


def test_free_places_are_those_that_pages_have_not_taken() -> None:
    view = ReplicaView("a", 1000.0)
    assert view.num_free_places == 0, "nothing was heard of it"
    extra = {"expert_places": 40.0, "experts_resident": 10.0, "expert_bytes": 100.0}
    for sequence, gap_bytes, free in ((1, 1 << 20, 30), (2, 2_500, 15), (3, 500, 0)):
        view.accept(snapshot(sequence, gap_bytes=gap_bytes, extra=extra), float(sequence))
        assert view.num_free_places == free
    fresh = {"expert_places": 0.0, "experts_resident": 0.0, "expert_bytes": 100.0}
    view.accept(snapshot(4, gap_bytes=500, extra=fresh), 4.0)
    assert view.num_free_places == 5, "it has made no step yet"
