"""How far apart a stream's messages are."""

from __future__ import annotations

import pytest

from serve_app.policies.coalescing import CoalescingConfig, interval_s, rest_s

CONFIG = CoalescingConfig(messages_per_s=2_000.0, reserve=0.5, max_interval_s=0.1, min_interval_s=0.004)


@pytest.mark.parametrize(
    ("num_streams", "expected"),
    [(0, 0.0), (1, 0.0), (3, 0.0), (4, 0.004), (50, 0.05), (100, 0.1), (1_000, 0.1)],
)
def test_the_interval_grows_with_the_streams_up_to_its_bound(num_streams: int, expected: float) -> None:
    assert interval_s(num_streams, CONFIG) == pytest.approx(expected)


@pytest.mark.parametrize("num_streams", [4, 10, 64, 99])
def test_the_message_rate_stays_below_what_the_transport_carries(num_streams: int) -> None:
    assert num_streams / interval_s(num_streams, CONFIG) <= 2_000.0 * 0.5 + 1e-6


@pytest.mark.parametrize("num_streams", [64, 256, 1_000])
def test_so_it_does_by_default_up_to_a_thousand_streams(num_streams: int) -> None:
    config = CoalescingConfig()
    assert num_streams / interval_s(num_streams, config) <= config.messages_per_s * 0.7 + 1e-6


@pytest.mark.parametrize(
    ("interval", "expected"), [(0.0, 0.004), (0.02, 0.004), (0.05, 0.01), (0.1, 0.015), (1.0, 0.015)]
)
def test_a_router_hears_several_times_an_interval(interval: float, expected: float) -> None:
    assert rest_s(interval) == pytest.approx(expected)
