"""The engine step in order: what the ledger, the scheduler and the runner are told, in lock-step and overlapped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.scheduling import ALL_KINDS, FULL, Desk, make_desk
from worker.loop import EngineLoop


class _Spy:
    """Passes every call on and writes it down with its first arguments."""

    def __init__(self, inner: Any, calls: list[tuple[Any, ...]], names: tuple[str, ...]) -> None:
        self._inner, self._calls, self._names = inner, calls, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def call(*arguments: Any) -> Any:
            steps = [getattr(argument, "step", argument) for argument in arguments]
            self._calls.append((name, *steps))
            return found(*arguments)

        return call


def spied(overlap: bool) -> tuple[Desk, EngineLoop, list[tuple[Any, ...]]]:
    desk = make_desk(FULL, "free lists")
    calls: list[tuple[Any, ...]] = []
    ledger = _Spy(desk.ledger, calls, ("begin_step", "commit_step", "end_step", "audit"))
    scheduler = _Spy(desk.scheduler, calls, ("schedule", "apply"))
    runner = _Spy(desk.runner, calls, ("launch", "collect"))
    return desk, EngineLoop(scheduler, ledger, runner, overlap), calls  # type: ignore[arg-type]


def test_in_lock_step_a_turn_is_one_whole_step() -> None:
    desk, loop, calls = spied(overlap=False)
    desk.ask("a", range(5), max_tokens=2, ignore_eos=True)
    desk.take(loop.step())
    desk.take(loop.step())
    expected: list[tuple[Any, ...]] = []
    for step in (0, 1):
        expected += [
            ("begin_step", step, step - 1),
            ("schedule", step),
            ("commit_step", step),
            ("launch", step),
        ]
        expected += [("collect", step), ("apply", step, step), ("end_step", step)]
    assert calls == expected
    assert not loop.has_work
    desk.check_answers()


def test_overlapped_the_next_step_is_launched_before_the_last_is_collected() -> None:
    desk, loop, calls = spied(overlap=True)
    desk.ask("a", range(5), max_tokens=2, ignore_eos=True)
    while loop.has_work:
        desk.take(loop.step())
    whole = [("begin_step", 0, -1), ("schedule", 0), ("commit_step", 0), ("launch", 0)]
    whole += [("begin_step", 1, -1), ("schedule", 1), ("commit_step", 1), ("launch", 1)]
    whole += [("collect", 0), ("apply", 0, 0), ("end_step", 0)]
    # The second token is the last one asked for: step 2 has nothing to launch, so step 1 is waited for.
    whole += [("begin_step", 2, 0), ("schedule", 2), ("commit_step", 2)]
    whole += [("collect", 1), ("apply", 1, 1), ("end_step", 1), ("end_step", 2)]
    assert calls == whole
    desk.check_answers()


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_count_only_where_something_was_computed(overlap: bool) -> None:
    desk, loop, _ = spied(overlap)
    loop.step()
    assert (loop.num_steps, loop.has_work) == (0, False)
    desk.ask("a", range(5), max_tokens=3, ignore_eos=True)
    while loop.has_work:
        desk.take(loop.step())
    loop.settle()
    assert loop.num_steps == 3
    assert sum(kind.pending_bytes for kind in desk.ledger.headroom().kinds.values()) == 0


def test_an_idle_loop_lets_copies_to_the_host_finish() -> None:
    desk = make_desk(ALL_KINDS, host_tier_bytes=1 << 16)
    desk.ask("a", range(200), max_tokens=3, ignore_eos=True)
    desk.ledger._spill._budget_bytes = 1  # a page a step
    while desk.scheduler.has_work:
        desk.step()
    waiting = desk.ledger.report()["host_tier"]["waiting_pages"]
    assert waiting > 5
    desk.loop.settle(waiting + 2)
    assert desk.ledger.report()["host_tier"]["waiting_pages"] == 0
