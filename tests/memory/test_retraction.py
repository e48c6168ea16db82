"""Who is sent back, what that costs, and how often it happens."""

from __future__ import annotations

import pytest

from memory.ledger.retraction import RetractionCandidate, RetractionRate, choose_victim, retraction_cost


def _candidate(request: int, known: int, cached: int = 0, release_bytes: int = 1000) -> RetractionCandidate:
    return RetractionCandidate(request, known, cached, release_bytes, arrival=request)


def test_the_cheapest_that_brings_enough_goes() -> None:
    oldest = _candidate(0, 10)
    cheap, dear = _candidate(1, 500, cached=480), _candidate(2, 300)
    assert choose_victim([oldest, dear, cheap], 800) == cheap
    assert retraction_cost(cheap) == 20
    assert choose_victim([oldest, dear, _candidate(1, 500, 480, release_bytes=100)], 800) == dear


def test_shared_pages_bring_nothing() -> None:
    shared = _candidate(1, 100, release_bytes=0)
    assert choose_victim([shared], 10) is None
    assert choose_victim([_candidate(0, 9000), shared, _candidate(2, 900)], 10) == _candidate(2, 900)


def test_the_oldest_stays_so_that_somebody_finishes() -> None:
    oldest, younger = _candidate(0, 1), _candidate(1, 10**6)
    assert choose_victim([oldest, younger], 1) == younger
    assert choose_victim([oldest], 1) == oldest
    assert choose_victim([], 1) is None


def test_where_nobody_brings_enough_the_most_bytes_per_token_go() -> None:
    candidates = [
        _candidate(0, 1),
        _candidate(1, 1000, release_bytes=500),
        _candidate(2, 10, release_bytes=400),
    ]
    assert choose_victim(candidates, 10**9) == candidates[2]


def test_of_equals_the_younger_goes() -> None:
    assert choose_victim([_candidate(n, 100) for n in range(4)], 1) == _candidate(3, 100)


def test_the_rate_forgets_what_left_the_window() -> None:
    rate = RetractionRate(window_s=10)
    for now in range(4):
        rate.retracted(now)
    for now in range(8):
        rate.finished(now)
    assert rate.per_second(8) == pytest.approx(0.4)
    assert rate.per_thousand(8) == pytest.approx(500)
    assert rate.per_second(11.5) == pytest.approx(0.2)
    assert rate.per_second(100) == 0
    assert rate.per_thousand(100) == 0
    assert (rate.num_retractions, rate.num_finished) == (4, 8)
