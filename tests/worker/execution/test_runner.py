"""The runner carries plans out: memory commands, tables, states, tokens that stay on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from memory.api import Move, PageCopy, StepCommands, TableUpdate
from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from worker.api import SamplingParams
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner
from worker.scheduling.step import GroupTables, StepPlan, StepResult

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
PROMPT = [20 + (7 * i) % 200 for i in range(50)]


@pytest.fixture
def runner() -> ModelRunner:
    folder = tiny_folder("qwen3_5_moe", window=48)
    return ModelRunner(
        WorkerConfig(model=str(folder), page_tokens=16, max_running=16, host_tier_bytes=1 << 20)
    )


@pytest.fixture
def driver(runner: ModelRunner) -> PlanDriver:
    driver = PlanDriver(runner, arena_bytes=1 << 22)
    runner.arena.buffer.fill_(0xFF)
    return driver


def continue_alone(driver: PlanDriver, prompt: list[int], steps: int) -> list[int]:
    request = driver.add(prompt, GREEDY)
    for _ in range(steps):
        driver.step({request: driver.rows[request].num_pending})
    tokens = driver.rows[request].tokens[len(prompt) :]
    driver.remove(request)
    return tokens


def test_pages_used_before_leave_no_trace(driver: PlanDriver) -> None:
    first = continue_alone(driver, PROMPT, 10)
    continue_alone(driver, PROMPT[::-1], 10)
    assert continue_alone(driver, PROMPT, 10) == first
    assert continue_alone(driver, PROMPT[:1], 3) == continue_alone(driver, PROMPT[:1], 3)


def test_a_token_still_on_the_device_is_taken_from_its_slot(runner: ModelRunner, driver: PlanDriver) -> None:
    expected = continue_alone(driver, PROMPT, 6)
    other = driver.add(PROMPT[::-1], GREEDY)
    driver.step({other: len(PROMPT)})
    request = driver.add(PROMPT, GREEDY)
    driver.step({request: len(PROMPT)})
    row = driver.rows[request]
    handles = []
    for _ in range(5):
        plan = driver._plan([driver.rows[other], row], [1, 1], {})
        handles.append(runner.launch(replace(plan, token_ids=np.array([-1, -1]))))
        for driven in (driver.rows[other], row):
            driven.num_computed += 1
            driven.tokens.append(-1)
    results = [runner.collect(handle) for handle in handles]
    assert [expected[0], *(int(r.token_ids[1, 0]) for r in results)] == expected


def test_a_chunk_that_does_not_reach_the_end_brings_nothing(driver: PlanDriver) -> None:
    request = driver.add(PROMPT, GREEDY)
    _, result = driver.step({request: 20})
    assert result.num_new.tolist() == [0]
    assert result.token_ids.tolist() == [[-1]]
    assert result.logprobs == ()


def through_tables(plan: StepPlan, shift: int, commands: StepCommands) -> StepPlan:
    """The same plan over virtual ids that are ``shift`` above the physical ones."""
    groups = {
        name: GroupTables(np.where(t.tables < 0, -1, t.tables + shift), t.first_page)
        for name, t in plan.groups.items()
    }
    return replace(plan, groups=groups, commands=commands)


def bind(plan: StepPlan, shift: int) -> tuple[TableUpdate, ...]:
    found = []
    for name, t in plan.groups.items():
        physical = sorted({int(p) for p in t.tables.flatten() if p >= 0})
        found.append(TableUpdate(name, tuple(p + shift for p in physical), tuple(physical)))
    return tuple(found)


def test_virtual_pages_go_through_the_table(runner: ModelRunner, driver: PlanDriver) -> None:
    expected = continue_alone(driver, PROMPT, 1)
    request = driver.add(PROMPT, GREEDY)
    plan = driver._plan([driver.rows[request]], [len(PROMPT)], {})
    bound = through_tables(plan, 1, StepCommands(plan.step, table=bind(plan, 1)))
    assert runner.run(bound).token_ids[0].tolist() == expected
    with pytest.raises(LookupError, match="bound to nothing"):
        runner.run(through_tables(plan, 2, StepCommands(plan.step)))
    with pytest.raises(LookupError, match="bound to nothing"):
        runner.run(through_tables(plan, 1 << 20, StepCommands(plan.step)))


def moved(driver: PlanDriver, request: int, kind: str) -> StepCommands:
    """Commands that move or copy every page of a request to a free one, and the driver told so."""
    moves, copies = [], []
    for group, pages in driver.rows[request].pages.items():
        for place, page in enumerate(pages):
            target = driver._free[group].pop(0)
            if kind == "move":
                moves.append(Move(group, page, page, target, sealed=False))
            elif kind == "copy":
                copies.append(PageCopy(group, page, target))
            else:
                copies.append(PageCopy(group, page, place, to_host=True))
                copies.append(PageCopy(group, place, target, from_host=True))
            pages[place] = target
    return StepCommands(99, moves=tuple(moves), copies=tuple(copies))


@pytest.mark.parametrize("kind", ["move", "copy", "host tier"])
def test_pages_that_move_take_their_bytes_along(runner: ModelRunner, driver: PlanDriver, kind: str) -> None:
    expected = continue_alone(driver, PROMPT, 8)
    request = driver.add(PROMPT, GREEDY)
    row = driver.rows[request]
    for _ in range(4):
        driver.step({request: row.num_pending})
    old = {group: list(pages) for group, pages in row.pages.items()}
    commands = moved(driver, request, kind)
    empty = np.zeros(0, dtype=np.int64)
    plan = StepPlan(99, empty, empty, empty, empty, empty, empty.astype(bool), 0, {}, commands)
    result = runner.run(plan)
    assert result.token_ids.shape == (0, 1)
    for group, pages in old.items():
        runner.arena.grids[group][pages] = 0xFF
    for _ in range(4):
        driver.step({request: row.num_pending})
    assert row.tokens[len(PROMPT) :] == expected


def test_a_token_without_a_page_is_refused(runner: ModelRunner, driver: PlanDriver) -> None:
    request = driver.add(PROMPT, GREEDY)
    plan = driver._plan([driver.rows[request]], [len(PROMPT)], {})
    short = plan.groups["full"].tables.copy()
    short[0, 3] = -1
    groups = {**plan.groups, "full": GroupTables(short, plan.groups["full"].first_page)}
    with pytest.raises(LookupError, match="group 'full': row 0 has a token without a page"):
        runner.run(replace(plan, groups=groups))
    groups = {**plan.groups, "state": GroupTables(np.array([[-1]]), np.array([0]))}
    with pytest.raises(LookupError, match="row 0 has no state page"):
        runner.run(replace(plan, groups=groups))


def test_memory_must_be_attached_whole(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="state"):
        runner.attach_memory([s for s in runner.page_specs if s.name != "state"], 1 << 20)
    with pytest.raises(RuntimeError, match="attach_memory"):
        runner.arena


def seeded(driver: PlanDriver, prompts: list[list[int]], seeds: list[int], together: bool) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=64, temperature=1.0, top_p=0.9, seed=1)
    requests = [driver.add(p, sampling, seed=s) for p, s in zip(prompts, seeds, strict=True)]
    for group in [requests] if together else [[r] for r in requests]:
        for _ in range(6):
            driver.step({r: driver.rows[r].num_pending for r in group})
    return [driver.rows[r].tokens[len(p) :] for r, p in zip(requests, prompts, strict=True)]


def test_seeded_draws_do_not_depend_on_company(runner: ModelRunner, driver: PlanDriver) -> None:
    prompts = [PROMPT, PROMPT[:20], PROMPT[10:]]
    together = seeded(driver, prompts, [5, 6, 5], together=True)
    assert seeded(driver, prompts, [5, 6, 5], together=False) == together
    assert seeded(driver, prompts, [6, 7, 8], together=True) != together


def test_a_step_result_is_plain(driver: PlanDriver) -> None:
    request = driver.add(PROMPT, replace(GREEDY, logprobs=2))
    plan, result = driver.step({request: len(PROMPT)})
    assert isinstance(result, StepResult)
    assert result.step == plan.step
    assert result.token_ids.dtype == np.int64
    said = result.logprobs[0][0]
    assert said.token_id == result.token_ids[0, 0] == said.top[0][0]
    assert said.logprob == said.top[0][1] > said.top[1][1]
    assert not torch.is_inference_mode_enabled()
