"""Who gets memory: refused at the door, admitted when it fits, waited for, sent back, and given back at the end."""

from __future__ import annotations

import numpy as np
import pytest

from memory.api import PageAsk, Shortage
from memory.ledger.ledger import ArenaLedger
from tests.helpers.scheduling import (
    ALL_KINDS,
    FULL,
    HYBRID,
    LEDGERS,
    WITH_EXPERTS,
    Desk,
    bytes_for,
    make_desk,
    optimist,
)
from worker.api import FinishReason
from worker.errors import InvalidRequest, PromptTooLong
from worker.scheduling.admission import OutputForecast, has_fixed_shares, peak_growth_tokens

PAGE_BYTES = 128
"""Of a FULL page of 16 tokens."""


NO_END = {"logit_bias": ((3, -100.0),)}
"""Never stops early, but the scheduler cannot know."""


def test_a_request_beyond_the_context_is_refused_with_both_numbers() -> None:
    desk = make_desk()
    with pytest.raises(PromptTooLong) as caught:
        desk.ask("a", range(4000), max_tokens=97)
    assert (caught.value.num_tokens, caught.value.max_tokens) == (4097, 4096)


@pytest.mark.parametrize("ledger", LEDGERS)
def test_a_request_that_could_never_end_is_refused_with_the_bytes(ledger: str) -> None:
    budget = bytes_for(HYBRID, ledger, 200)
    desk = make_desk(HYBRID, ledger, budget)
    desk.ask("fits", range(150), max_tokens=50, ignore_eos=True)
    with pytest.raises(PromptTooLong) as caught:
        desk.ask("never", range(150), max_tokens=150)
    assert caught.value.num_tokens == 300
    assert 200 <= caught.value.max_tokens < 300
    assert f"arena of {budget // 128 * 128:,} bytes" in str(caught.value)
    assert "arena_bytes" in str(caught.value)
    desk.finish()
    desk.check_answers()


def test_a_grammar_is_refused_where_nothing_can_enforce_it() -> None:
    from worker.api import GenerateRequest, Grammar

    with pytest.raises(InvalidRequest) as caught:
        make_desk().scheduler.check(GenerateRequest("a", (1,), grammar=Grammar("json_object")))
    assert caught.value.field == "response_format"


def test_requests_wait_until_their_whole_prompt_fits() -> None:
    desk = make_desk(FULL, "free lists", 10 * PAGE_BYTES, prefix_cache=False)
    desk.ask("a", range(100), max_tokens=10, ignore_eos=True)
    desk.ask("b", range(100), max_tokens=10, ignore_eos=True)
    plans = desk.step(11)
    assert [plan.requests.tolist() for plan in plans] == [[0]] * 11
    assert desk.last("a").finish_reason is FinishReason.LENGTH
    (plan,) = desk.step()
    assert plan.requests.tolist() == [1]
    assert desk.finish() > 0
    desk.check_answers()
    assert desk.scheduler.statistics.retractions.num_retractions == 0


def test_admission_counts_the_output_that_is_sure_to_come() -> None:
    """Each of the two fits, and both prompts fit; both answers together do not."""
    for sure, retractions in ((True, 0), (False, 1)):
        desk = make_desk(FULL, "free lists", 12 * PAGE_BYTES, prefix_cache=False, forecast=optimist())
        for name in "ab":
            more = {"ignore_eos": True} if sure else NO_END
            desk.ask(name, range(32), max_tokens=96, **more)
        desk.finish()
        desk.check_answers()
        assert (desk.scheduler.statistics.retractions.num_retractions > 0) == bool(retractions)


def test_the_peak_of_what_is_held_is_just_before_somebody_ends() -> None:
    tokens = np.array
    assert peak_growth_tokens(tokens([100, 0]), tokens([0, 50]), tokens([10, 100])) == 70, "both grow by 10"
    assert peak_growth_tokens(tokens([30, 0]), tokens([0, 50]), tokens([10, 100])) == 120, (
        "100 more, 30 given back"
    )
    assert peak_growth_tokens(tokens([]), tokens([]), tokens([])) == 0
    held, growth, left = tokens([500, 40, 7]), tokens([3, 0, 20]), tokens([9, 30, 2])
    worst = 0
    for now in range(31):  # one token a step; those that end give everything back
        alive = left >= now
        worst = max(worst, int((growth + now)[alive].sum() - held[~alive].sum()))
    assert peak_growth_tokens(held, growth, left) == worst


def test_the_forecast_learns_from_answers_and_from_retractions() -> None:
    forecast = OutputForecast(0.5)
    for _ in range(300):
        forecast.ended(10, 100)
    assert forecast.fraction == pytest.approx(0.1, abs=0.01)
    forecast.retracted()
    assert forecast.fraction == pytest.approx(0.2, abs=0.01)
    for _ in range(300):
        forecast.ended(100, 100)
    assert forecast.fraction == pytest.approx(1.0, abs=0.01)


def crowded(overlap: bool = False, ledger: str = "free lists") -> Desk:
    """Three requests that will want 15 pages together, where 12 are."""
    desk = make_desk(FULL, ledger, 12 * PAGE_BYTES, prefix_cache=False, forecast=optimist(), overlap=overlap)
    for name, length in (("old", 20), ("large", 52), ("small", 8)):
        desk.ask(name, range(length), max_tokens=64, **NO_END)
    return desk


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
def test_the_cheapest_is_sent_back_but_never_the_oldest(overlap: bool) -> None:
    desk = crowded(overlap)
    while not desk.scheduler.statistics.retractions.num_retractions:
        desk.step()
    waiting = desk.scheduler.waiting.peek()
    assert waiting is not None
    assert waiting.asked.request_id == "small", "it has the least to compute again, apart from the oldest"
    desk.finish()
    desk.check_answers()
    assert desk.last("old").timeline.num_retractions == 0  # type: ignore[union-attr]
    assert desk.last("small").timeline.num_retractions >= 1  # type: ignore[union-attr]


@pytest.mark.parametrize("ledger", LEDGERS)
def test_whoever_was_sent_back_is_first_in_the_queue(ledger: str) -> None:
    desk = crowded(ledger=ledger)
    desk.step(2)
    desk.ask("late", range(8), max_tokens=4, ignore_eos=True)
    desk.scheduler.running.send_back(2)
    desk.scheduler.running.send_back(1)
    order = []
    while (request := desk.scheduler.waiting.peek()) is not None:
        order.append(desk.scheduler.waiting.pop().asked.request_id)
        assert request.asked.request_id == order[-1]
    assert order == ["large", "small", "late"], "in order of arrival, ahead of the new one"


def test_frees_on_their_way_are_waited_for_before_anybody_is_sent_back() -> None:
    """In step 18 the older request needs an eighth page of seven. Another one ended with step 16, but step 17, still
    in flight, reads its three pages. The youngest could be sent back, but need not."""
    alone = make_desk()
    alone.ask("ends", range(30), seed=1, max_tokens=30, **NO_END)
    alone.finish()
    stop = alone.tokens("ends")[16]
    assert stop not in alone.tokens("ends")[:16]
    desk = make_desk(
        FULL, "free lists", 7 * PAGE_BYTES, prefix_cache=False, forecast=optimist(), overlap=True
    )
    desk.ask("older", range(15), max_tokens=40, **NO_END)
    desk.ask("ends", range(30), seed=1, max_tokens=30, stop_token_ids=(stop,), **NO_END)
    desk.ask("youngest", range(5), max_tokens=26, **NO_END)
    waited = 0
    while desk.loop.has_work:
        desk.step()
        waited += desk.scheduler.running.disturbed
    assert waited == 1, "the case is not there"
    assert desk.scheduler.statistics.retractions.num_retractions == 0
    desk.check_answers()


def test_one_shortage_sends_one_back_although_it_takes_effect_a_step_later() -> None:
    desk = make_desk(
        FULL, "free lists", 8 * PAGE_BYTES, prefix_cache=False, forecast=optimist(), overlap=True
    )
    for number in range(4):  # four times two pages, all want a third one in the same step
        desk.ask(f"r{number}", range(20), max_tokens=28, **NO_END)
    while not desk.scheduler.statistics.retractions.num_retractions:
        desk.step()
    desk.step()
    assert desk.scheduler.statistics.retractions.num_retractions <= 2
    assert desk.scheduler.rows.num_running >= 2
    desk.finish()
    desk.check_answers()


def test_speed_returns_after_a_storm_of_retractions() -> None:
    """Two rounds of the same ample load, with a storm between them; tokens per step must come back."""
    desk = make_desk(FULL, arena_bytes=80 * PAGE_BYTES, max_running=16, max_step_tokens=256)

    def tokens_per_step(name: str, max_tokens: int, **more: object) -> float:
        for number in range(32):
            desk.ask(f"{name}{number}", [number, *range(40)], max_tokens=max_tokens, **more)
        return 32 * max_tokens / desk.finish()

    before = tokens_per_step("before", 32, ignore_eos=True)
    running = desk.scheduler.running
    for number in range(32):
        desk.ask(f"storm{number}", [number, *range(60)], max_tokens=64, **NO_END)
    while desk.loop.has_work:
        desk.step()
        taken = desk.scheduler.rows.taken()
        if len(taken) > 1 and desk.scheduler.statistics.retractions.num_retractions < 40:
            running.send_back(int(taken[-1]))
    assert desk.scheduler.statistics.retractions.num_retractions >= 40
    assert tokens_per_step("after", 32, ignore_eos=True) >= 0.95 * before
    desk.check_answers()
    desk.check_empty()


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
@pytest.mark.parametrize("ledger", LEDGERS)
def test_an_abort_gives_everything_back(ledger: str, overlap: bool) -> None:
    desk = make_desk(ALL_KINDS, ledger, overlap=overlap, max_running=2, max_step_tokens=32)
    for name in ("decoding", "in prefill", "waiting", "other waiting"):
        desk.ask(name, range(20 if name == "decoding" else 90), max_tokens=50, ignore_eos=True)
    desk.step(3)
    for name in ("in prefill", "decoding", "waiting", "decoding", "unknown", "waiting"):
        desk.abort(name)
    desk.step()
    for name in ("decoding", "in prefill", "waiting"):
        last = desk.last(name)
        assert (last.finish_reason, last.num_generated) == (FinishReason.ABORT, len(desk.tokens(name)))
        assert last.timeline is not None
    desk.finish()
    desk.check_answers()
    desk.check_empty()
    assert desk.last("other waiting").finish_reason is FinishReason.LENGTH
    assert desk.scheduler.statistics.num_aborted == 3


def test_a_token_that_comes_after_an_abort_is_dropped() -> None:
    desk = make_desk(overlap=True)
    desk.ask("a", range(10), max_tokens=50, ignore_eos=True)
    desk.step(3)
    before = desk.tokens("a")
    desk.abort("a")
    assert desk.last("a").finish_reason is None, "a step is in flight"
    desk.finish()
    assert desk.tokens("a") in (before, [*before, *desk.expected("a")[len(before) : len(before) + 1]])
    assert [event.finish_reason for event in desk.events["a"]][-1] is FinishReason.ABORT
    desk.check_answers()


def test_pinned_pages_make_a_request_wait_and_do_not_send_anybody_back() -> None:
    desk = make_desk(FULL, "free lists", 8 * PAGE_BYTES, prefix_cache=False)
    desk.ask("read by a transfer", range(100), max_tokens=1, ignore_eos=True)
    desk.step()
    pin = desk.ledger.pin(0)
    desk.step(2)
    desk.ask("next", range(100), max_tokens=2, ignore_eos=True)
    desk.step(5)
    assert desk.tokens("next") == []
    desk.ledger.unpin(pin)
    desk.finish()
    desk.check_answers()
    desk.check_empty()


def test_the_free_lists_hold_to_their_books() -> None:
    desk = make_desk(ALL_KINDS, "free lists", 20_000)
    ledger = desk.ledger
    ledger.begin_step(0, -1)
    assert not isinstance(ledger.grant(PageAsk(0, 100)), Shortage)
    ledger.audit()
    held = ledger.release_bytes(0)
    free = ledger.headroom().available_bytes
    ledger.commit_step(0)
    ledger.release(0)
    assert ledger.headroom().available_bytes == free + held
    assert sum(kind.pending_bytes for kind in ledger.headroom().kinds.values()) == held, "step 0 reads them"
    with pytest.raises(RuntimeError, match="released twice"):
        ledger.release(0)
    ledger.begin_step(1, 0)
    assert sum(kind.pending_bytes for kind in ledger.headroom().kinds.values()) == 0
    ledger.audit()


@pytest.mark.parametrize("ledger", LEDGERS)
def test_the_scheduler_knows_whether_memory_is_one_or_shared_out(ledger: str) -> None:
    for specs in (FULL, HYBRID, ALL_KINDS):
        assert has_fixed_shares(make_desk(specs, ledger).ledger.headroom()) == (ledger != "arena")
    most = ArenaLedger(WITH_EXPERTS, 1 << 18, floor_places=300)
    assert not has_fixed_shares(most.headroom()), "a floor of experts is nobody's share"


def test_kept_states_are_room_for_an_answer_where_memory_is_one() -> None:
    """Two thirds of the arena hold checkpoints nobody uses; they must not keep the second request waiting."""
    desk = make_desk(HYBRID, arena_bytes=24_000, max_running=4)
    for number in range(30):
        desk.ask(f"old{number}", [number, *range(70)], max_tokens=1, ignore_eos=True)
    desk.finish()
    kept = desk.ledger.headroom().kinds["state"].reclaimable_bytes
    assert kept > 8_000, "the case is not there"
    for name in "ab":
        desk.ask(name, range(100, 200), max_tokens=500, ignore_eos=True)
    desk.step(3)
    assert desk.scheduler.rows.num_running == 2
    desk.finish()
    desk.check_answers()
    assert desk.scheduler.statistics.retractions.num_retractions == 0
