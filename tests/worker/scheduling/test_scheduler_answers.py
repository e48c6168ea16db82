"""Whatever is batched, chunked, shared, sent back or overlapped: every request gets the answer of its own tokens."""

from __future__ import annotations

import random

import pytest

from tests.helpers.scheduling import (
    ALL_KINDS,
    FULL,
    HYBRID,
    LEDGERS,
    RECURRENT,
    WINDOWED,
    WITH_EXPERTS,
    Desk,
    bytes_for,
    make_desk,
    optimist,
)
from worker.api import FinishReason

SPECS = {"full": FULL, "hybrid": HYBRID, "windowed": WINDOWED, "all": ALL_KINDS, "recurrent": RECURRENT}
MOST_TOKENS = 300
"""Of one request below."""


def crowd(desk: Desk, count: int, seed: int, name: str = "r") -> None:
    """Requests of all lengths, half of them starting alike."""
    rng = random.Random(seed)
    starts = [tuple(rng.randrange(200) for _ in range(160)) for _ in range(2)]
    for number in range(count):
        prompt = tuple(rng.randrange(200) for _ in range(rng.choice((1, 2, 30, 64, 65, 150))))
        if number % 2:
            prompt = rng.choice(starts)[: rng.choice((64, 100, 160))] + prompt[:40]
        desk.ask(
            f"{name}{number}",
            prompt,
            max_tokens=rng.choice((1, 2, 20, 100)),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(number,) if rng.random() < 0.3 else (),
        )


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
@pytest.mark.parametrize("name", SPECS)
def test_answers_are_right_for_every_kind_of_memory(name: str, overlap: bool) -> None:
    desk = make_desk(SPECS[name], overlap=overlap)
    crowd(desk, 24, seed=1)
    desk.finish()
    desk.check_answers()
    desk.check_empty()
    assert desk.scheduler.statistics.cached_tokens > 0, "no prefix was shared: the case is not there"


@pytest.mark.parametrize(
    ("name", "ledger"), [*(("full", ledger) for ledger in LEDGERS), ("all", "arena"), ("all", "split")]
)
def test_answers_are_right_when_memory_is_short(name: str, ledger: str) -> None:
    budget = int(1.4 * bytes_for(SPECS[name], ledger, MOST_TOKENS))
    desk = make_desk(SPECS[name], ledger, budget, overlap=True, forecast=optimist())
    crowd(desk, 24, seed=2)
    desk.finish()
    desk.check_answers()
    desk.check_empty()
    assert desk.scheduler.statistics.retractions.num_retractions > 0, "nobody was sent back"


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
@pytest.mark.parametrize("name", ["hybrid", "windowed", "recurrent"])
def test_a_request_sent_back_goes_on_where_it_was(name: str, overlap: bool) -> None:
    budget = 2 * bytes_for(SPECS[name], "arena", MOST_TOKENS)
    desk = make_desk(SPECS[name], arena_bytes=budget, overlap=overlap, forecast=optimist())
    crowd(desk, 16, seed=3)
    turns = 0
    while desk.loop.has_work:
        desk.step()
        turns += 1
        assert turns < 5000, "it never ends"
        rows = desk.scheduler.rows
        if turns % 7 == 0 and rows.num_running > 1:  # also where memory alone would not
            slot = int(rows.taken()[-1])
            if not rows.leaving[slot]:
                desk.scheduler.running.send_back(slot)
    desk.loop.settle()
    desk.check_answers()
    desk.check_empty()
    assert desk.scheduler.statistics.retractions.num_retractions > 5


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
def test_experts_fill_the_gap_and_never_touch_a_page(overlap: bool) -> None:
    """The runner overwrites every usable expert place in every step."""
    budget = 2 * bytes_for(WITH_EXPERTS, "arena", MOST_TOKENS)
    desk = make_desk(
        WITH_EXPERTS, arena_bytes=budget, overlap=overlap, forecast=optimist(), prefix_cache=False
    )
    idle = []
    for round_number in range(3):
        crowd(desk, 12, seed=round_number, name=f"round{round_number}.")
        fewest = desk.runner.num_usable_places
        while desk.loop.has_work:
            desk.step()
            fewest = min(fewest, desk.runner.num_usable_places)
        desk.loop.settle(50)
        idle.append((fewest, desk.runner.num_usable_places))
    desk.check_answers()
    desk.check_empty()
    assert all(fewest < after for fewest, after in idle), f"places did not come and go: {idle}"


def test_tokens_do_not_depend_on_overlap_or_batch() -> None:
    answers = []
    for options in ({"overlap": False}, {"overlap": True}, {"max_running": 1}, {"max_step_tokens": 7}):
        desk = make_desk(ALL_KINDS, **options)  # type: ignore[arg-type]
        crowd(desk, 12, seed=4)
        desk.finish()
        answers.append({request_id: desk.tokens(request_id) for request_id in desk.requests})
    assert all(found == answers[0] for found in answers)


def test_every_stop_rule_ends_the_output_where_it_should() -> None:
    desk = make_desk()
    prompt = tuple(range(50, 80))
    free = make_desk()
    free.ask("free", prompt, seed=5, max_tokens=60, ignore_eos=True)
    free.finish()
    tokens = free.tokens("free")
    stop = tokens[20]
    first = tokens.index(stop)
    asked = {"seed": 5, "ignore_eos": True}
    desk.ask("length", prompt, max_tokens=7, **asked)
    desk.ask("stop", prompt, max_tokens=60, stop_token_ids=(stop,), **asked)
    desk.ask("eos", prompt, max_tokens=60, seed=5, logit_bias=((3, 100.0),))
    desk.ask("eos late", prompt, max_tokens=60, seed=5, logit_bias=((3, 100.0),), min_tokens=9)
    desk.ask("eos ignored", prompt, max_tokens=6, seed=5, logit_bias=((3, 100.0),), ignore_eos=True)
    desk.finish()
    last = {request_id: desk.last(request_id) for request_id in desk.requests}
    assert desk.tokens("length") == tokens[:7]
    assert desk.tokens("stop") == tokens[: first + 1]
    assert desk.tokens("eos") == [3]
    assert (len(desk.tokens("eos late")), desk.tokens("eos late")[-1]) == (10, 3)
    assert desk.tokens("eos ignored") == [3] * 6
    found = {request_id: (event.finish_reason, event.stop_token_id) for request_id, event in last.items()}
    assert found == {
        "length": (FinishReason.LENGTH, None),
        "stop": (FinishReason.STOP, stop),
        "eos": (FinishReason.STOP, 3),
        "eos late": (FinishReason.STOP, 3),
        "eos ignored": (FinishReason.LENGTH, None),
    }
    assert all(event.num_generated == len(desk.tokens(name)) for name, event in last.items())
