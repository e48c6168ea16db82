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


class PromptCost:
    """What a token of a prompt costs here, from steps and passes that computed little else."""

    def __init__(self, memory: float = 0.2, least_tokens: int = 32) -> None:
        self.ms_per_token = 0.0
        """0 until the first prompt"""
        self.busy_s = 0.0
        """seconds spent on prompts so far"""
        self._decode_s = 0.0
        self._mark_s = 0.0
        self._memory = memory
        self._least_tokens = least_tokens

    def note(self, prompt_tokens: int, other_tokens: int, seconds: float) -> None:
        """A step of so many tokens took ``seconds``."""
        self.busy_s += seconds * prompt_tokens / max(1, prompt_tokens + other_tokens)
        if not prompt_tokens:
            self._decode_s += seconds
        if prompt_tokens < self._least_tokens or prompt_tokens < 4 * other_tokens:
            return
        fresh = 1e3 * seconds / prompt_tokens
        self.ms_per_token += (fresh - self.ms_per_token) * (self._memory if self.ms_per_token else 1.0)

    def begin_pass(self) -> None:
        """A pass begins: steps noted from here on run beside it."""
        self._mark_s = self._decode_s

    def end_pass(self, prompt_tokens: int, seconds: float) -> None:
        """It took ``seconds`` in all."""
        self.note(prompt_tokens, 0, max(0.0, seconds - (self._decode_s - self._mark_s)))


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
        self.prompt_cost = PromptCost()
