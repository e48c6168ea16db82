"""When a stream's tokens are sent."""

from __future__ import annotations

import pytest

from serve_app.policies.coalescing import CoalescingConfig, StreamPacer, interval_s

CONFIG = CoalescingConfig(
    messages_per_s=2_000.0, reserve=0.5, max_interval_s=0.1, max_tokens=16, min_interval_s=0.004
)


@pytest.mark.parametrize(
    ("num_streams", "expected"),
    [(0, 0.0), (1, 0.0), (3, 0.0), (4, 0.004), (50, 0.05), (100, 0.1), (1_000, 0.1)],
)
def test_the_interval_grows_with_the_streams_up_to_its_bound(num_streams: int, expected: float) -> None:
    assert interval_s(num_streams, CONFIG) == pytest.approx(expected)


@pytest.mark.parametrize("num_streams", [4, 10, 64, 99])
def test_the_message_rate_stays_below_what_the_transport_carries(num_streams: int) -> None:
    assert num_streams / interval_s(num_streams, CONFIG) <= 2_000.0 * 0.5 + 1e-6


def test_the_first_token_goes_at_once_and_the_next_waits() -> None:
    pacer = StreamPacer(CONFIG)
    assert pacer.due_s(1, False, 50, 7.0) == 7.0
    pacer.sent(7.0)
    assert pacer.due_s(1, False, 50, 7.01) == pytest.approx(7.05)


@pytest.mark.parametrize(("gathered", "finished"), [(16, False), (40, False), (0, True), (3, True)])
def test_a_full_message_and_the_end_do_not_wait(gathered: int, finished: bool) -> None:
    pacer = StreamPacer(CONFIG)
    pacer.sent(7.0)
    assert pacer.due_s(gathered, finished, 1_000, 7.001) == 7.001


def test_nothing_gathered_is_never_due() -> None:
    pacer = StreamPacer(CONFIG)
    assert pacer.due_s(0, False, 50, 7.0) == float("inf")
    pacer.sent(7.0)
    assert pacer.due_s(0, False, 50, 9.0) == float("inf")


def test_few_streams_send_every_token_at_once() -> None:
    pacer = StreamPacer(CONFIG)
    pacer.sent(7.0)
    assert pacer.due_s(1, False, 2, 7.001) <= 7.001
