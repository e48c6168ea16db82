"""What a worker counts about itself, and its rates over the last seconds."""

from __future__ import annotations

from collections import deque

from memory.ledger.retraction import RetractionRate

RATE_WINDOW_S = 10.0


class RecentMean:
    """Mean of the values of the last seconds, 0 if there were none."""

    def __init__(self, window_s: float = RATE_WINDOW_S, most: int = 256) -> None:
        self._window_s = window_s
        self._most = most
        self._values: deque[tuple[float, float]] = deque()
        self._total = 0.0

    def add(self, now_s: float, value: float) -> None:
        """One more value."""
        if len(self._values) == self._most:
            self._drop_oldest()
        self._values.append((now_s, value))
        self._total += value

    def mean(self, now_s: float) -> float:
        """The mean now."""
        while self._values and self._values[0][0] <= now_s - self._window_s:
            self._drop_oldest()
        return self._total / len(self._values) if self._values else 0.0

    def _drop_oldest(self) -> None:
        self._total -= self._values.popleft()[1]
        if not self._values:  # what rounding left goes with the last value
            self._total = 0.0


class Statistics:
    """Counters for a worker's life, and its recent rates."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_aborted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.retractions = RetractionRate(RATE_WINDOW_S)
        self.queue_waits = RecentMean()
        self.step_times = RecentMean()
