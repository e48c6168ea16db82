"""The scheduler's other faces: grammars, recordings, snapshots, drafts, and what it refuses to believe."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from memory.api import NO_MATCH
from tests.helpers.fake_runner import VOCAB_SIZE, FakeRunner
from tests.helpers.scheduling import ALL_KINDS, FULL, make_desk
from worker.api import GenerateRequest, Grammar, SamplingParams
from worker.errors import InvalidRequest
from worker.loop import EngineLoop
from worker.scheduling.recording import StepRecorder, read_steps, replay
from worker.scheduling.request import Request
from worker.scheduling.snapshots import take_snapshot
from worker.scheduling.step import StepResult


class _Counting:
    """A "grammar" whose output must be token 10, 11, 12, ..."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def check(self, grammar: Grammar) -> None:
        if grammar.kind != "json_object":
            raise InvalidRequest("response_format", "no")

    def open(self, request: int, grammar: Grammar) -> None:
        self.seen[request] = []

    def mask(self, request: int) -> npt.NDArray[np.int32] | None:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
        bits[10 + len(self.seen[request])] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, request: int, token_ids: Sequence[int]) -> None:
        self.seen[request] += token_ids

    def close(self, request: int) -> None:
        del self.seen[request]


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
def test_rows_bound_by_a_grammar_get_its_tokens_and_do_not_stop_the_others(overlap: bool) -> None:
    grammars = _Counting()
    desk = make_desk(overlap=overlap, grammars=grammars)
    desk.ask("free", range(9), max_tokens=30, ignore_eos=True)
    bound = GenerateRequest("bound", (1, 2), SamplingParams(max_tokens=12), grammar=Grammar("json_object"))
    desk.scheduler.check(bound)
    desk.scheduler.submit(bound)
    desk.events["bound"] = []
    plans = desk.step(8)
    desk.scheduler.running.send_back(1)
    desk.finish()
    assert desk.tokens("bound") == list(range(10, 22))
    assert desk.tokens("free") == desk.expected("free")
    assert grammars.seen == {}, "every matcher was closed"
    assert [0 in plan.requests for plan in plans] == [True] * 8
    if overlap:
        bound_in = [1 in plan.requests for plan in plans]
        assert bound_in == [True, False] * 4, "its mask needs the token that is in flight"
    with pytest.raises(InvalidRequest):
        desk.scheduler.check(replace(bound, grammar=Grammar("lark")))


@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
def test_recorded_steps_give_the_same_tokens_again(tmp_path: Path, overlap: bool) -> None:
    desk = make_desk(ALL_KINDS, arena_bytes=1 << 16)
    path = tmp_path / "steps"
    with StepRecorder(path) as record:
        loop = EngineLoop(desk.scheduler, desk.ledger, desk.runner, overlap, record=record)
        for number in range(6):
            desk.ask(f"r{number}", range(number * 30 + 1), max_tokens=20)
        while loop.has_work:
            desk.take(loop.step())
    desk.check_answers()
    runner = FakeRunner(ALL_KINDS)
    runner.attach_memory(ALL_KINDS, 1 << 16)
    count = 0
    for then, now in replay(read_steps(path), runner):
        assert (then.result.token_ids == now.token_ids).all()
        count += 1
    assert count == len(desk.runner.plans) > 20


def test_a_snapshot_says_what_goes_on() -> None:
    desk = make_desk(max_running=2)

    def now(time_s: float) -> object:
        return take_snapshot(desk.scheduler, desk.ledger, 1, desk.loop.num_steps, time_s, False)

    for number in range(4):
        desk.ask(f"r{number}", range(30 + number), max_tokens=20, ignore_eos=True)
    first = take_snapshot(desk.scheduler, desk.ledger, 1, 0, 0.0, False)
    assert (first.num_running, first.num_waiting, first.waiting_tokens) == (0, 4, 30 + 31 + 32 + 33)
    desk.step(5)
    queued = desk.scheduler.waiting.peek()
    assert queued is not None
    seen = take_snapshot(desk.scheduler, desk.ledger, 2, desk.loop.num_steps, queued.queued_s + 7.0, True)
    assert (seen.num_running, seen.num_waiting, seen.waiting_tokens) == (2, 2, 32 + 33)
    assert (seen.num_steps, seen.num_submitted, seen.max_running, seen.draining) == (5, 4, 2, True)
    assert seen.queue_wait_s == pytest.approx(7.0), "the head of the queue shows"
    assert seen.generated_tokens == sum(len(desk.tokens(f"r{number}")) for number in range(4))
    assert seen.headroom.kinds["full"].used_bytes > 0
    full = desk.ledger.specs["full"]
    assert seen.extra["kv_bytes_per_token"] == full.page_bytes / full.page_tokens, (
        "placement prices room by it"
    )
    desk.scheduler.running.send_back(1)
    clock = desk.scheduler.statistics.retractions
    assert clock.num_retractions == 1
    desk.finish()
    done = take_snapshot(desk.scheduler, desk.ledger, 3, desk.loop.num_steps, queued.queued_s + 1.0, False)
    assert (done.num_finished, done.num_retractions, done.num_waiting, done.num_running) == (4, 1, 0, 0)
    assert done.retraction_rate == pytest.approx(0.1), "one in the last ten seconds"
    stamps = [timeline for n in range(4) if (timeline := desk.last(f"r{n}").timeline) is not None]
    assert [len(timeline.retracted_s) for timeline in stamps] == [t.num_retractions for t in stamps]
    [sent_back] = [timeline for timeline in stamps if timeline.retracted_s]
    assert sent_back.scheduled_s <= sent_back.retracted_s[0] <= sent_back.finished_s
    assert done.extra["retractions_per_thousand"] == pytest.approx(250.0)
    assert done.step_s == pytest.approx(1e-4)


def test_several_tokens_a_step_are_cut_at_the_first_stop() -> None:
    """As a runner with accepted drafts would bring them."""
    desk = make_desk(FULL, prefix_cache=False)
    desk.ask("a", range(10), max_tokens=5, ignore_eos=True)
    desk.ask("b", range(12), max_tokens=9, stop_token_ids=(8,), ignore_eos=True)
    desk.ask("c", range(14), max_tokens=9, ignore_eos=True)
    desk.ledger.begin_step(0, -1)
    plan = desk.scheduler.schedule(0)
    desk.ledger.commit_step(0)
    tokens = np.array([[5, 6, -1], [7, 8, 9], [4, -1, -1]])
    desk.take(desk.scheduler.apply(plan, StepResult(0, tokens, np.array([2, 3, 1]))))
    assert [desk.tokens(name) for name in "abc"] == [[5, 6], [7, 8], [4]]
    assert desk.last("b").stop_token_id == 8
    assert desk.last("a").num_generated == 2
    desk.ledger.begin_step(1, 0)
    again = desk.scheduler.schedule(1)
    assert (again.num_computed.tolist(), again.token_ids.tolist()) == ([11, 14], [6, 4])


def test_end_tokens_before_min_tokens_do_not_end_the_output() -> None:
    """A runner makes them impossible; the scheduler must not depend on it."""
    desk = make_desk(FULL, prefix_cache=False)
    desk.ask("a", range(10), max_tokens=5, min_tokens=2)
    ends = []
    for step in range(3):
        desk.ledger.begin_step(step, step - 1)
        plan = desk.scheduler.schedule(step)
        desk.ledger.commit_step(step)
        desk.take(desk.scheduler.apply(plan, StepResult(step, np.array([[3]]), np.array([1]))))
        ends.append(desk.last("a").finish_reason is not None)
    assert ends == [False, False, True]


def test_results_that_do_not_belong_to_the_plan_are_not_believed() -> None:
    desk = make_desk()
    desk.ask("a", range(10), max_tokens=5)
    desk.ledger.begin_step(0, -1)
    plan = desk.scheduler.schedule(0)
    with pytest.raises(RuntimeError, match="step 4"):
        desk.scheduler.apply(plan, StepResult(4, np.array([[1]]), np.array([1])))
    with pytest.raises(RuntimeError, match="no token"):
        desk.scheduler.apply(plan, StepResult(0, np.array([[-1]]), np.array([0])))


def test_an_id_is_used_once_at_a_time() -> None:
    desk = make_desk()
    desk.ask("a", range(10), max_tokens=5)
    with pytest.raises(InvalidRequest, match="in use"):
        desk.ask("a", range(10), max_tokens=5)
    desk.finish()
    desk.ask("a", range(10), max_tokens=5)
    desk.finish()


def test_requests_given_up_behind_one_that_waits_are_let_go() -> None:
    desk = make_desk(FULL, max_running=1)
    for name in ("runs", "waits"):
        desk.ask(name, range(20), max_tokens=60, ignore_eos=True)
    desk.step(2)
    for number in range(1000):
        desk.ask(f"given up {number}", range(20), max_tokens=60)
        if number % 100 == 50:
            desk.ask(f"kept{number}", range(20), max_tokens=2)
        desk.abort(f"given up {number}")
    assert len(desk.scheduler.waiting) == 11
    alive = [thing for thing in gc.get_objects() if type(thing) is Request]
    assert sum(request.asked.request_id.startswith("given up") for request in alive) < 100
    desk.finish()
    desk.check_answers()
    desk.check_empty()


def test_requests_without_a_seed_differ_and_repeat_with_the_worker() -> None:
    def answers() -> list[list[int]]:
        desk = make_desk()
        for name in "ab":
            desk.ask(name, range(10), seed=None, max_tokens=20, ignore_eos=True)
        desk.finish()
        return [desk.tokens(name) for name in "ab"]

    first, second = answers()
    assert first != second
    assert answers() == [first, second]


def test_a_step_without_rows_but_with_commands_reaches_the_device() -> None:
    desk = make_desk(prefix_cache=False)
    desk.ask("a", range(10), max_tokens=2, ignore_eos=True)
    desk.finish()
    last = desk.runner.plans[-1]
    assert last.num_rows == 0
    assert last.commands.table, "the pages were unbound"
    assert desk.ledger.match(range(10)) == NO_MATCH
