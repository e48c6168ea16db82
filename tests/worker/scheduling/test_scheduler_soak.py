"""Thousands of random steps in too little memory: submits, aborts, limits, full queues; the books must balance."""

from __future__ import annotations

import random

import pytest

from tests.helpers.scheduling import ALL_KINDS, HYBRID, LEDGERS, Desk, bytes_for, make_desk, optimist
from worker.errors import InvalidRequest, PromptTooLong

FAST = [(5000, "arena", True), (1000, "free lists", False), (1000, "split", True)]
LONG = [(10_000, ledger, overlap) for ledger in LEDGERS for overlap in (False, True)]
MOST_TOKENS = 260


def _submit(desk: Desk, rng: random.Random, name: str, starts: list[tuple[int, ...]]) -> None:
    prompt = tuple(rng.randrange(200) for _ in range(rng.choice((1, 3, 16, 60, 120))))
    if rng.random() < 0.4:
        prompt = (rng.choice(starts) + prompt)[:160]
    max_tokens = rng.choice((1, 5, 40, 100))
    bias = ((3, -100.0),) if rng.random() < 0.5 else ()
    desk.ask(
        name,
        prompt,
        salt=rng.choice(("", "", "tenant")),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.2,
        min_tokens=rng.choice((0, 0, 0, 0, 0, max_tokens)),
        stop_token_ids=tuple(rng.sample(range(250), rng.choice((0, 0, 3)))),
        logit_bias=bias,
    )


def _soak(num_steps: int, ledger: str, overlap: bool, seed: int) -> Desk:
    specs = ALL_KINDS if ledger != "free lists" else HYBRID
    rng = random.Random(seed)
    budget = int(1.8 * bytes_for(specs, ledger, MOST_TOKENS))
    desk = make_desk(specs, ledger, budget, max_running=6, overlap=overlap, forecast=optimist())
    desk.runner.keep_plans = False
    starts = [tuple(rng.randrange(200) for _ in range(100)) for _ in range(3)]
    live: list[str] = []
    number = refused = 0
    while desk.loop.num_steps < num_steps:
        live = [name for name in live if not desk.events[name] or desk.last(name).finish_reason is None]
        while len(live) < 12 and rng.random() < 0.4:
            _submit(desk, rng, f"r{number}", starts)
            live.append(f"r{number}")
            number += 1
        if rng.random() < 0.01:
            with pytest.raises(PromptTooLong):
                desk.ask("too long", range(4000), max_tokens=90)
            with pytest.raises(PromptTooLong, match="arena"):
                desk.ask("too large", range(3000), max_tokens=90)
            refused += 2
        if live and rng.random() < 0.02:
            with pytest.raises(InvalidRequest, match="in use"):
                desk.scheduler.submit(desk.requests[rng.choice(live)])
        if live and rng.random() < 0.05:
            desk.abort(rng.choice(live))
        desk.take(desk.loop.step())
    desk.finish()
    assert refused > 0
    return desk


def _check(desk: Desk) -> None:
    desk.check_answers()
    desk.check_empty()
    counts = desk.scheduler.statistics
    retractions = counts.retractions
    assert counts.num_submitted == retractions.num_finished + counts.num_aborted == len(desk.requests)
    assert min(counts.num_aborted, retractions.num_finished) > 40
    assert retractions.num_retractions >= 5, "memory was never short"


@pytest.mark.parametrize(("num_steps", "ledger", "overlap"), FAST)
def test_a_soak_ends_with_an_empty_ledger(num_steps: int, ledger: str, overlap: bool) -> None:
    desk = _soak(num_steps, ledger, overlap, seed=num_steps)
    _check(desk)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("num_steps", "ledger", "overlap"), LONG)
def test_a_long_soak_ends_with_an_empty_ledger(num_steps: int, ledger: str, overlap: bool) -> None:
    _check(_soak(num_steps, ledger, overlap, seed=7))
