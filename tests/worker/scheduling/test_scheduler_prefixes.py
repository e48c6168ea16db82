"""What requests share: prefixes by tokens and salt, checkpoints of states, and a request's own pages after it was
sent back."""

from __future__ import annotations

import pytest

from tests.helpers.fake_runner import expected_tokens
from tests.helpers.scheduling import ALL_KINDS, FULL, HYBRID, WINDOWED, Desk, bytes_for, make_desk
from worker.api import SamplingParams
from worker.scheduling.branches import BranchFinder

SPECS = {"full": FULL, "hybrid": HYBRID, "windowed": WINDOWED, "all": ALL_KINDS}
PROMPT = tuple(range(20, 170))


def cached(desk: Desk, request_id: str) -> int:
    """How many tokens of a finished request came from the cache."""
    line = desk.last(request_id).timeline
    assert line is not None
    return line.num_cached_tokens


@pytest.mark.parametrize(
    ("name", "expected"), [("full", 144), ("hybrid", 128), ("windowed", 128), ("all", 128)]
)
def test_a_prompt_seen_before_starts_behind_what_is_kept(name: str, expected: int) -> None:
    desk = make_desk(SPECS[name])
    desk.ask("first", PROMPT, max_tokens=5, ignore_eos=True)
    desk.finish()
    desk.ask("again", PROMPT, max_tokens=5, ignore_eos=True)
    desk.ask("longer", (*PROMPT, 5, 6), max_tokens=5, ignore_eos=True)
    desk.ask("other salt", PROMPT, salt="tenant", max_tokens=5, ignore_eos=True)
    desk.ask("other start", PROMPT[1:], max_tokens=5, ignore_eos=True)
    desk.finish()
    desk.check_answers()
    found = [
        cached(desk, request_id) for request_id in ("first", "again", "longer", "other salt", "other start")
    ]
    assert found == [0, expected, expected, 0, 0]
    counts = desk.scheduler.statistics
    assert (counts.prompt_tokens, counts.cached_tokens) == (150 * 4 + 152 - 1, 2 * expected)


@pytest.mark.parametrize("name", SPECS)
def test_a_running_request_shares_its_prompt(name: str) -> None:
    desk = make_desk(SPECS[name])
    desk.ask("first", PROMPT, max_tokens=100, ignore_eos=True)
    desk.step(6)
    desk.ask("second", PROMPT, max_tokens=3, ignore_eos=True)
    desk.finish()
    assert cached(desk, "second") >= 128
    desk.check_answers()


@pytest.mark.parametrize("name", SPECS)
def test_a_conversation_goes_on_from_its_last_turn(name: str) -> None:
    desk = make_desk(SPECS[name])
    desk.ask("turn 1", PROMPT, max_tokens=150, ignore_eos=True)
    desk.finish()
    follow_up = (*PROMPT, *desk.tokens("turn 1"), 9, 9, 9)
    desk.ask("turn 2", follow_up, max_tokens=5, ignore_eos=True)
    desk.finish()
    assert cached(desk, "turn 2") >= 256
    desk.check_answers()


def test_without_the_cache_nothing_is_kept() -> None:
    desk = make_desk(ALL_KINDS, prefix_cache=False)
    free = desk.ledger.headroom().available_bytes
    for name in ("first", "again"):
        desk.ask(name, PROMPT, max_tokens=5, ignore_eos=True)
        desk.finish()
    assert cached(desk, "again") == 0
    headroom = desk.ledger.headroom()
    assert headroom.available_bytes == free
    assert sum(kind.reclaimable_bytes for kind in headroom.kinds.values()) == 0


@pytest.mark.parametrize("name", ["full", "all"])
def test_deterministic_requests_never_start_from_another_ones_output(name: str) -> None:
    desk = make_desk(SPECS[name], deterministic=True, max_step_tokens=128)
    desk.ask("turn 1", PROMPT, max_tokens=150, ignore_eos=True)
    desk.finish()
    follow_up = (*PROMPT, *desk.tokens("turn 1"), 9, 9, 9)
    desk.ask("turn 2", follow_up, max_tokens=5, ignore_eos=True)
    desk.finish()
    desk.ask("other end", (*PROMPT[:90], 1, 2, 3), max_tokens=5, ignore_eos=True)
    desk.finish()
    assert cached(desk, "turn 2") == 128, "the prompt's last checkpoint, no further"
    assert cached(desk, "other end") == 64 * (name == "full"), "no chunk may begin elsewhere"
    desk.check_answers()


@pytest.mark.parametrize("name", SPECS)
def test_who_comes_back_finds_its_own_pages(name: str) -> None:
    desk = make_desk(SPECS[name])
    desk.ask("a", PROMPT, max_tokens=200, ignore_eos=True)
    desk.step(140)
    before = len(desk.tokens("a"))
    desk.scheduler.running.send_back(int(desk.scheduler.rows.taken()[0]))
    (plan,) = desk.step()
    assert plan.num_computed[0] >= 256
    assert plan.started[0].known_token_ids == (*PROMPT, *desk.expected("a")[:before])
    desk.finish()
    desk.check_answers()


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
@pytest.mark.parametrize("rolling", [False, True], ids=["at the end", "rolling"])
def test_a_state_carried_past_the_end_is_not_kept(
    overlap: bool, rolling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer stops with 128 tokens computed, a place for a checkpoint; overlapped, a step in flight goes on. What
    was offered before that step is right nevertheless."""
    if not rolling:
        monkeypatch.setattr("worker.scheduling.prefixes.OUTPUTS_A_STEP", 0)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    answers = ((seed, expected_tokens(HYBRID, range(100), sampling, seed)) for seed in range(100))
    seed, tokens = next((seed, tokens) for seed, tokens in answers if tokens[28] not in tokens[:28])
    stop = tokens[28]
    desk = make_desk(HYBRID, overlap=overlap)
    desk.ask("a", range(100), seed=seed, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    desk.finish()
    assert len(desk.tokens("a")) == 29
    desk.ask("next", (*range(100), *desk.tokens("a"), 1, 2), max_tokens=20, ignore_eos=True)
    desk.finish()
    desk.check_answers()
    assert cached(desk, "next") == (64 if overlap and not rolling else 128)


def test_long_prompts_are_kept_at_chunk_ends_and_not_cut_for_it() -> None:
    desk = make_desk(HYBRID, max_step_tokens=320)
    prompt = tuple(number % 200 for number in range(1000))
    desk.ask("a", prompt, max_tokens=1, ignore_eos=True)
    assert [plan.query_len.tolist() for plan in desk.step(4)] == [[320], [320], [320], [40]]
    desk.finish()
    for end in (300, 500, 700, 990):
        desk.ask(f"to {end}", (*prompt[:end], 7, 7), max_tokens=3, ignore_eos=True)
    desk.finish()
    assert [cached(desk, f"to {end}") for end in (300, 500, 700, 990)] == [0, 320, 640, 960]
    desk.check_answers()


def test_a_long_prompt_is_shared_while_it_is_still_computed() -> None:
    desk = make_desk(FULL, max_step_tokens=320)
    prompt = tuple(number % 200 for number in range(3000))
    desk.ask("long", prompt, max_tokens=1, ignore_eos=True)
    desk.step(5)
    assert not desk.tokens("long")
    assert desk.ledger.match(prompt[:1500]).num_tokens == 1280, "what the steps before this one computed"
    desk.finish()
    desk.check_answers()


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
@pytest.mark.parametrize("name", SPECS)
def test_prefixes_come_back_from_the_host_as_they_were(name: str, overlap: bool) -> None:
    """Three conversations take turns in an arena for little more than one; the host tier holds what had to go."""
    budget = int(1.3 * bytes_for(SPECS[name], "arena", 400))
    desk = make_desk(SPECS[name], arena_bytes=budget, max_running=2, overlap=overlap, host_tier_bytes=1 << 18)
    said = {chat: (chat, *PROMPT) for chat in range(3)}
    for turn in range(4):
        for chat in said:
            desk.ask(f"{chat}.{turn}", said[chat], max_tokens=20, ignore_eos=True)
            desk.finish()
            said[chat] += (*desk.tokens(f"{chat}.{turn}"), 5, 6, 7)
    desk.check_answers()
    desk.check_empty()
    assert desk.runner.num_from_host > 0, "nothing came back from the host"
    assert desk.scheduler.statistics.cached_tokens > 3 * 2 * 128


@pytest.mark.parametrize("name", SPECS)
def test_what_came_back_from_the_host_is_kept(name: str) -> None:
    """Even where the request that it came for reaches no other place to be kept."""
    desk = make_desk(SPECS[name], host_tier_bytes=1 << 18)
    prompt = (*range(128), 1, 2, 3)
    desk.ask("first", prompt, max_tokens=3, ignore_eos=True)
    desk.finish()
    desk.loop.settle()
    desk.ledger.shed(dict.fromkeys(desk.ledger.specs, 1 << 40))
    counts = []
    for number in range(3):
        desk.ask(f"again {number}", prompt, max_tokens=3, ignore_eos=True)
        desk.finish()
        counts.append(desk.runner.num_from_host)
    assert [cached(desk, f"again {number}") for number in range(3)] == [128] * 3
    assert counts[0] > 0
    assert counts == [counts[0]] * 3, "it came over the link again"
    desk.check_answers()
    desk.check_empty()


@pytest.mark.parametrize("name", ["hybrid", "windowed", "all"])
def test_prompts_that_begin_alike_share_from_the_third_on(name: str) -> None:
    """The first cannot know where others will part from it; the second does, and keeps its state there."""
    desk = make_desk(SPECS[name], max_step_tokens=512)
    system = tuple(range(7, 107))
    for number in range(4):
        desk.ask(f"r{number}", (*system, *(number * 9 + n for n in range(60))), max_tokens=3, ignore_eos=True)
        plans = desk.step(3)
        if number == 1:
            assert [plan.query_len.tolist() for plan in plans] == [[64], [64], [32]], "cut where they part"
        desk.finish()
    assert [cached(desk, f"r{number}") for number in range(4)] == [0, 0, 64, 64]
    desk.ask("other salt", (*system, 1, 2, 3), salt="tenant", max_tokens=3, ignore_eos=True)
    desk.finish()
    assert cached(desk, "other salt") == 0
    desk.check_answers()


def test_the_branch_finder_forgets_the_oldest() -> None:
    finder = BranchFinder(4, most_blocks=4)
    assert finder.visit(tuple(range(10)), "") == 0
    assert finder.visit((*range(8), 99, 99, 99, 99), "") == 8
    assert finder.visit(tuple(range(8)), "salt") == 0
    assert finder.visit(tuple(range(4)), "") == 0, "its block was the oldest of five"


@pytest.mark.parametrize("name", ["hybrid", "windowed", "all"])
def test_of_an_output_the_last_place_is_kept_and_no_other(name: str) -> None:
    """While it grows, its checkpoint moves along: the next turn computes at most a block of it again."""
    desk = make_desk(SPECS[name], max_running=4)
    desk.ask("a", range(100), max_tokens=300, ignore_eos=True)
    kept = 0
    while "a" in desk.scheduler.live_ids():
        desk.step()
        kinds = desk.ledger.headroom().kinds
        kept = max(kept, kinds["state"].reclaimable_bytes if "state" in kinds else 0)
    desk.ask("again", (*range(100), 7), max_tokens=5, ignore_eos=True)
    desk.ask("next", (*range(100), *desk.tokens("a"), 1, 2), max_tokens=20, ignore_eos=True)
    desk.finish()
    desk.check_answers()
    assert cached(desk, "again") == 64
    assert cached(desk, "next") == 384
    if name != "windowed":
        assert 0 < kept <= 3 * desk.ledger.specs["state"].page_bytes, "checkpoints of the output pile up"
