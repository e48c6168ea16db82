"""Means of the last seconds."""

from __future__ import annotations

import random

import pytest

from worker.scheduling.statistics import RecentMean


def test_only_the_last_seconds_and_the_last_values_count() -> None:
    rng, recent, kept, now = (
        random.Random(3),
        RecentMean(window_s=5.0, most=8),
        list[tuple[float, float]](),
        0.0,
    )
    for _ in range(500):
        now += rng.choice((0.1, 0.9, 7.0))
        for _ in range(rng.randrange(4)):
            kept.append((now, rng.uniform(0, 1e6)))
            recent.add(*kept[-1])
        seen = [value for at, value in kept[-8:] if at > now - 5.0]
        assert recent.mean(now) == pytest.approx(sum(seen) / len(seen) if seen else 0.0)
    assert recent.mean(now + 10) == 0.0
