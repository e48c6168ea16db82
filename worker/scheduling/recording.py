"""Keeps the plans and results of an engine's steps in a file, so that another runner can be given the same steps."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from worker.scheduling.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A plan and what came of it."""

    plan: StepPlan
    result: StepResult


class PlanRunner(Protocol):
    """Anything that carries a plan out."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step, start to end."""
        ...


class StepRecorder:
    """Appends steps to a file of pickles, one behind the other. Use as a context manager, or ``close`` it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """Writes one step."""
        pickle.dump(RecordedStep(plan, result), self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """The steps of a recording in order. Only read recordings that you made: they are pickles."""
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def replay(steps: Iterable[RecordedStep], runner: PlanRunner) -> Iterator[tuple[RecordedStep, StepResult]]:
    """Gives a runner with fresh memory the recorded plans; yields what was recorded beside what came now."""
    for step in steps:
        yield step, runner.run(step.plan)
