"""Counts what an engine did over its life and states it as a :class:`WorkerSnapshot`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from memory.api import Headroom
from worker.api import WorkerSnapshot

RATE_WINDOW_S = 10.0
"""Rates and averages of a snapshot are taken over so many seconds."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """What is in an engine right now."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    max_running: int
    draining: bool


@dataclass(slots=True)
class EngineCounters:
    """Mutable counters of one engine; the owner's lock guards them."""

    num_steps: int = 0
    num_submitted: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    _sequence: int = 0
    _retractions: deque[float] = field(default_factory=deque)
    _waits: deque[tuple[float, float]] = field(default_factory=deque)
    _steps: deque[tuple[float, float]] = field(default_factory=deque)

    def retracted(self) -> None:
        """One running request was sent back to the queue."""
        self.num_retractions += 1
        self._retractions.append(time.monotonic())

    def scheduled(self, waited_s: float) -> None:
        """A request left the queue after ``waited_s``."""
        self._waits.append((time.monotonic(), waited_s))

    def stepped(self, took_s: float) -> None:
        """A step that computed something took ``took_s``."""
        self.num_steps += 1
        self._steps.append((time.monotonic(), took_s))
        if len(self._steps) > 256:
            self._steps.popleft()

    def snapshot(self, queue: QueueState, headroom: Headroom) -> WorkerSnapshot:
        """The counters and the queue as one value; sequence numbers grow by one per snapshot."""
        self._sequence += 1
        oldest = time.monotonic() - RATE_WINDOW_S
        while self._retractions and self._retractions[0] < oldest:
            self._retractions.popleft()
        return WorkerSnapshot(
            sequence=self._sequence,
            time_s=time.time(),
            num_steps=self.num_steps,
            num_submitted=self.num_submitted,
            num_running=queue.num_running,
            num_waiting=queue.num_waiting,
            waiting_tokens=queue.waiting_tokens,
            max_running=queue.max_running,
            headroom=headroom,
            num_finished=self.num_finished,
            num_aborted=self.num_aborted,
            num_retractions=self.num_retractions,
            retraction_rate=len(self._retractions) / RATE_WINDOW_S,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            queue_wait_s=_recent_mean(self._waits, oldest),
            step_s=_recent_mean(self._steps, oldest),
            draining=queue.draining,
        )


def _recent_mean(samples: deque[tuple[float, float]], oldest: float) -> float:
    while samples and samples[0][0] < oldest:
        samples.popleft()
    return sum(value for _, value in samples) / len(samples) if samples else 0.0
