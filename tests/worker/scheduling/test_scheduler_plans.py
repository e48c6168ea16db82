"""What a step computes: chunks, mixed steps, order of rows, pages, fairness between prompts and running answers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.fake_runner import full_spec, state_spec, window_spec
from tests.helpers.scheduling import FULL, HYBRID, WINDOWED, Desk, make_desk
from worker.errors import ConfigError
from worker.scheduling.budget import ChunkRule, choose_decode_rows, last_checkpoint
from worker.scheduling.step import StepPlan

ENDLESS = {"max_tokens": 1000, "ignore_eos": True}


def rows_of(desk: Desk, plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """(request, computed before, tokens, samples) of each row."""
    columns = (plan.requests, plan.num_computed, plan.query_len, plan.samples)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_prompt_is_computed_in_chunks_of_the_step_budget() -> None:
    desk = make_desk(ledger="free lists", max_step_tokens=40)
    desk.ask("a", range(100), max_tokens=2, ignore_eos=True)
    plans = desk.step(4)
    assert [rows_of(desk, plan) for plan in plans] == [
        [(0, 0, 40, False)],
        [(0, 40, 40, False)],
        [(0, 80, 20, True)],
        [(0, 100, 1, True)],
    ]
    assert [plan.token_ids.tolist() for plan in plans[:3]] == [
        list(range(40)),
        list(range(40, 80)),
        list(range(80, 100)),
    ]
    assert plans[3].token_ids.tolist() == desk.tokens("a")[:1]
    assert [row.known_token_ids for row in plans[0].started] == [tuple(range(100))]
    assert [plan.started for plan in plans[1:]] == [(), (), ()]


def test_prompts_join_running_answers_in_one_step_and_single_tokens_come_first() -> None:
    desk = make_desk(max_step_tokens=64)
    desk.ask("a", range(10), **ENDLESS)
    desk.step()
    desk.ask("long", range(20, 50), **ENDLESS)
    desk.ask("one", (7,), **ENDLESS)
    (plan,) = desk.step()
    assert rows_of(desk, plan) == [(0, 10, 1, True), (2, 0, 1, True), (1, 0, 30, True)]
    assert plan.num_decode_rows == 2
    assert plan.num_tokens == 32


def test_tables_name_exactly_the_pages_of_each_row() -> None:
    desk = make_desk((full_spec(16), window_spec(20, 16), state_spec()), "free lists", max_step_tokens=64)
    desk.ask("a", range(70), **ENDLESS)
    first, second, third = desk.step(3)
    full, window = first.groups["full"], first.groups["window20"]
    assert len({*full.tables[0].tolist()}) == full.tables.shape[1] == 4
    assert window.tables.shape == (1, 4)
    assert (window.first_page.tolist(), full.first_page.tolist()) == ([0], [0])
    # 64 computed: the next query sees positions 45 and up, the first of them in page 2.
    window = second.groups["window20"]
    assert window.first_page.tolist() == [2]
    assert window.tables[0].tolist()[:2] == first.groups["window20"].tables[0].tolist()[2:]
    assert second.groups["full"].tables[0].tolist()[:4] == full.tables[0].tolist()
    assert second.groups["full"].tables.shape == (1, 5)
    assert third.groups["state"].tables.shape == (1, 1)
    assert (third.groups["state"].tables == first.groups["state"].tables).all()


def test_a_plan_does_not_change_after_it_was_made() -> None:
    desk = make_desk(WINDOWED, overlap=True, max_step_tokens=32)
    desk.ask("a", range(90), max_tokens=90, ignore_eos=True)
    copies: list[StepPlan] = []
    while desk.loop.has_work:
        before = len(desk.runner.plans)
        desk.step()
        for plan in desk.runner.plans[before:]:
            copies.append(
                StepPlan(**{**vars(plan), "token_ids": plan.token_ids.copy(), "groups": _copied(plan)})
            )
    for plan, copy in zip(desk.runner.plans, copies, strict=True):
        assert (plan.token_ids == copy.token_ids).all()
        for name, group in plan.groups.items():
            assert (group.tables == copy.groups[name].tables).all()


def _copied(plan: StepPlan) -> dict[str, object]:
    return {n: type(g)(g.tables.copy(), g.first_page.copy()) for n, g in plan.groups.items()}


def test_overlap_plans_with_the_last_token_still_on_the_device() -> None:
    desk = make_desk(overlap=True)
    desk.ask("a", range(10), **ENDLESS)
    plans = desk.step(3)
    assert [plan.token_ids.tolist() for plan in plans] == [list(range(10)), [-1], [-1]]
    assert len(desk.tokens("a")) == 2, "the third step is in flight"


def test_running_answers_leave_room_for_a_prompt_and_take_turns() -> None:
    desk = make_desk(max_running=8, max_step_tokens=8)
    for number in range(8 - 1):
        desk.ask(f"r{number}", (number + 1,), **ENDLESS)
    desk.step(4)
    desk.ask("long", range(100), **ENDLESS)
    plans = desk.step(60)
    prefill = sum(int(plan.query_len[plan.requests == 7].sum()) for plan in plans)
    assert prefill == 100 + (len(desk.tokens("long")) - 1), "the prompt got through"
    counts = np.array([sum(number in plan.requests for plan in plans) for number in range(7)])
    assert counts.max() - counts.min() <= 1, "rows that did not fit were the same ones again"


def test_running_answers_go_on_while_a_long_prompt_is_computed() -> None:
    desk = make_desk(max_step_tokens=32)
    desk.ask("a", range(5), **ENDLESS)
    desk.step()
    desk.ask("long", range(200), **ENDLESS)
    before = len(desk.tokens("a"))
    turns = 0
    while not desk.tokens("long"):
        desk.step()
        turns += 1
    assert turns == 7, "31 tokens a step"
    assert len(desk.tokens("a")) == before + turns


def test_running_answers_are_not_held_up_by_whole_prompts() -> None:
    desk = make_desk(max_step_tokens=200, chunk_tokens=50, prefix_cache=False)
    desk.ask("a", range(5), **ENDLESS)
    desk.ask("b", range(150), **ENDLESS)
    assert desk.step()[0].num_tokens == 155, "nobody decodes yet"
    desk.ask("c", range(60), **ENDLESS)
    desk.ask("d", range(60), **ENDLESS)
    lengths = [plan.query_len.tolist() for plan in desk.step(3)]
    assert lengths == [[1, 1, 50], [1, 1, 10, 40], [1, 1, 1, 20]]


def test_a_long_prompt_does_not_starve_behind_short_ones() -> None:
    desk = make_desk(max_running=2, max_step_tokens=32)
    desk.ask("first", range(30), max_tokens=3, ignore_eos=True)
    desk.ask("long", range(200), max_tokens=3, ignore_eos=True)
    for turn in range(60):
        desk.ask(f"short{turn}", range(20), max_tokens=2, ignore_eos=True)
        desk.step()
        if desk.tokens("long"):
            break
    assert desk.tokens("long"), "the queue was overtaken"
    assert sum(bool(desk.tokens(f"short{n}")) for n in range(turn + 1)) <= 8


def test_no_more_rows_run_than_allowed() -> None:
    desk = make_desk(max_running=3)
    for number in range(7):
        desk.ask(f"r{number}", range(5 + number), max_tokens=10, ignore_eos=True)
    plans = desk.step(30)
    assert max(plan.num_rows for plan in plans) == 3
    assert all(plan.num_tokens <= 64 for plan in plans)
    assert {request for plan in plans for request in plan.requests.tolist()} == set(range(7))


@pytest.mark.parametrize(
    ("computed", "known", "budget", "cut", "expected"),
    [
        (0, 100, 1000, 0, 100),
        (0, 100, 70, 0, 64),
        (64, 100, 20, 0, 20),
        (0, 100, 1000, 64, 64),
        (64, 100, 9, 64, 9),
    ],
)
def test_chunks_end_at_checkpoints_where_the_budget_allows(
    computed: int, known: int, budget: int, cut: int, expected: int
) -> None:
    assert ChunkRule(64).length(computed, known, budget, cut) == expected


def test_strict_chunks_end_nowhere_else() -> None:
    rule = ChunkRule(64, strict=True)
    assert [rule.length(0, 200, budget) for budget in (63, 64, 130, 500)] == [0, 64, 128, 200]
    assert rule.length(192, 200, 3) == 0
    assert rule.kept_tokens(128) == 64


def test_a_checkpoint_leaves_a_token_to_compute() -> None:
    assert [last_checkpoint(count) for count in (1, 64, 65, 128, 129)] == [0, 0, 64, 64, 128]


def test_decode_rows_that_do_not_all_fit_take_turns() -> None:
    slots, cursor, served = np.array([0, 1, 3, 4, 9]), -1, []
    for _ in range(5):
        chosen, cursor = choose_decode_rows(slots, 3, cursor)
        served.append(chosen.tolist())
    assert served == [[0, 1, 3], [0, 4, 9], [1, 3, 4], [0, 1, 9], [3, 4, 9]]
    assert choose_decode_rows(slots, 5, 3)[0].tolist() == slots.tolist()


def test_hybrid_prompts_are_cut_where_their_state_can_be_kept() -> None:
    desk = make_desk(HYBRID, max_step_tokens=200)
    desk.ask("a", range(150), max_tokens=2, ignore_eos=True)
    plans = desk.step(3)
    assert [plan.query_len.tolist() for plan in plans] == [[128], [22], [1]]
    plain = make_desk(FULL, max_step_tokens=200)
    plain.ask("a", range(150), max_tokens=2, ignore_eos=True)
    assert [plan.query_len.tolist() for plan in plain.step(2)] == [[150], [1]]


def test_deterministic_steps_cut_prompts_at_fixed_places_and_recompute_output_one_by_one() -> None:
    desk = make_desk(HYBRID, max_step_tokens=100, deterministic=True)
    desk.ask("a", range(150), max_tokens=40, ignore_eos=True)
    assert [plan.query_len.tolist() for plan in desk.step(4)] == [[64], [64], [22], [1]]
    desk.step(6)
    desk.scheduler.running.send_back(int(desk.scheduler.rows.taken()[0]))
    again = desk.step(12)
    chunks = [plan.query_len.tolist() for plan in again]
    assert chunks[0] == [22], "from the checkpoint at 128, which no output entered"
    assert chunks[1:] == [[1]] * 11
    assert [bool(plan.samples[0]) for plan in again] == [False] * 8 + [True] * 4, (
        "8 known tokens, then new ones"
    )
    desk.finish()
    desk.check_answers()


def test_deterministic_prompts_get_on_beside_running_answers() -> None:
    with pytest.raises(ConfigError, match="at least 65"):
        make_desk(deterministic=True, max_step_tokens=64)
    desk = make_desk(HYBRID, deterministic=True, max_step_tokens=65, max_running=4)
    for number in range(3):
        desk.ask(f"r{number}", (number + 1,), max_tokens=100, ignore_eos=True)
    desk.step(4)
    desk.ask("long", range(200), max_tokens=3, ignore_eos=True)
    desk.step(8)
    assert desk.tokens("long"), "three whole chunks and the rest"
    desk.finish()
    desk.check_answers()
