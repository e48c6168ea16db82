"""Who waits in a Router, and for how long."""

from __future__ import annotations

import pytest

from serve_app.policies.admission import AdmissionConfig, AdmissionQueue, RefusalReason, Refused


def queue_of(*keys: str, now_s: float = 0.0, **config: float) -> AdmissionQueue:
    queue = AdmissionQueue(AdmissionConfig(**config))  # type: ignore[arg-type]
    for key in keys:
        assert queue.offer(key, now_s) is None
    return queue


def test_requests_leave_in_order_of_arrival() -> None:
    queue = queue_of("a", "b", "c")
    assert [queue.take(1.0) for _ in range(4)] == ["a", "b", "c", None]


def test_one_that_is_put_back_is_first_again() -> None:
    queue = queue_of("a", "b")
    assert queue.take(1.0) == "a"
    queue.put_back("a")
    assert [queue.take(1.0), queue.take(1.0)] == ["a", "b"]


def test_the_bound_counts_taken_ones_and_refuses_with_a_time() -> None:
    queue = queue_of("a", "b", max_waiting=2)
    queue.take(0.0)
    refused = queue.offer("c", 0.0)
    assert refused == Refused(RefusalReason.QUEUE_FULL, 1.0)
    queue.served("a", 0.5)
    assert queue.offer("c", 0.5) is None


def test_deadlines_end_the_wait() -> None:
    queue = queue_of(default_wait_s=10.0)
    queue.offer("short", 0.0, 2.0)
    queue.offer("long", 0.0)
    assert queue.expire(1.9) == []
    assert queue.take(2.0) == "long"  # the late one is passed over, and reported by expire
    assert queue.expire(2.0) == ["short"]
    queue.put_back("long")
    assert queue.expire(10.0) == ["long"]
    assert len(queue) == 0


def test_one_that_cannot_be_served_in_time_is_told_at_once() -> None:
    queue = queue_of(*"abcdefgh", default_wait_s=100.0)
    for tick, key in enumerate("abcd", start=1):
        assert queue.take(tick) == key
        queue.served(key, float(tick))
    # One a second, four before it.
    assert queue.offer("x", 4.0, 7.0) == Refused(RefusalReason.DEADLINE, 4.0)
    assert queue.offer("y", 4.0, 9.0) is None
    assert queue.offer("z", 4.0, 4.0) is not None


@pytest.mark.parametrize(("waiting", "gap_s", "expected"), [(1, 0.5, 1.0), (20, 0.5, 10.0), (500, 0.5, 60.0)])
def test_retry_after_is_the_time_to_place_what_waits(waiting: int, gap_s: float, expected: float) -> None:
    queue = queue_of(*(f"r{i}" for i in range(waiting + 3)), default_wait_s=1e6)
    for tick in range(3):
        queue.served(str(queue.take(0.0)), tick * gap_s)
    assert queue.retry_after_s() == pytest.approx(expected)


def test_a_rush_that_is_over_refuses_nobody() -> None:
    queue = queue_of("a", "b", default_wait_s=100.0)
    for tick, key in enumerate(("a", "b")):
        queue.take(0.0)
        queue.served(key, 20.0 * tick)
    queue.offer("c", 100.0)
    assert queue.take(100.0) == "c"
    queue.served("c", 100.0)
    queue.offer("d", 200.0)
    assert queue.offer("e", 200.0, 201.0) is None


def test_a_client_that_leaves_is_gone_from_both_places() -> None:
    queue = queue_of("a", "b")
    queue.take(0.0)
    assert queue.leave("a")
    assert queue.leave("b")
    assert not queue.leave("b")
    queue.put_back("a")
    queue.served("a", 1.0)
    assert queue.take(0.0) is None
    assert len(queue) == 0


def test_the_wait_is_measured() -> None:
    queue = queue_of("a", "b")
    assert queue.oldest_wait_s(3.0) == 3.0
    for _ in range(2):
        queue.served(str(queue.take(3.0)), 3.0)
    assert queue.wait_s == pytest.approx(0.3 + 0.27)
    assert queue.oldest_wait_s(5.0) == 0.0


def test_a_key_cannot_wait_twice() -> None:
    queue = queue_of("a")
    with pytest.raises(ValueError, match="waits already"):
        queue.offer("a", 0.0)
