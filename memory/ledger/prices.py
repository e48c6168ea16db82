"""What kept bytes are worth: milliseconds to compute again, and the order in which GreedyDual lets go."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Time to compute tokens again: a linear part and attention's part, which grows with the context.

    ``span_ms(first, last)`` sums ``ms_per_token + ms_per_token_context * position`` over positions [first, last).
    """

    ms_per_token: float = 0.02
    ms_per_token_context: float = 0.0

    def __post_init__(self) -> None:
        if self.ms_per_token <= 0 or self.ms_per_token_context < 0:
            raise ValueError("recompute cost needs ms_per_token > 0 and ms_per_token_context >= 0")

    def span_ms(self, first: int, last: int) -> float:
        """Milliseconds to compute the tokens at positions [first, last) behind an existing prefix."""
        count = last - first
        return count * (self.ms_per_token + self.ms_per_token_context * (first + last - 1) / 2)


class GreedyDual:
    """A priority queue with an ageing clock: priority = clock at the last use + worth per byte.

    Taking the cheapest item moves the clock up to its priority, so what is not used again grows cheap by itself and
    nothing is sorted anew. Replaced and discarded entries stay in the heap until they surface or outnumber the live
    ones, so every call costs O(log n) amortised. The clock is shared by passing it between queues.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._live: dict[int, tuple[float, int]] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: int) -> bool:
        return item in self._live

    def priority(self, item: int) -> float:
        """The item's priority; KeyError if it is not queued."""
        return self._live[item][0]

    def put(self, item: int, priority: float) -> None:
        """Queues ``item``, or changes its priority. Among equals the one put first goes first."""
        old = self._live.get(item)
        if old is not None and old[0] == priority:
            return
        self._pushed += 1
        self._live[item] = (priority, self._pushed)
        heapq.heappush(self._heap, (priority, self._pushed, item))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._drop_stale()

    def discard(self, item: int) -> None:
        """Takes ``item`` out if it is queued."""
        self._live.pop(item, None)

    def cheapest(self) -> tuple[int, float] | None:
        """(item, priority) of the cheapest item, or None."""
        while self._heap:
            priority, pushed, item = self._heap[0]
            if self._live.get(item) == (priority, pushed):
                return item, priority
            heapq.heappop(self._heap)
        return None

    def _drop_stale(self) -> None:
        self._heap = [(priority, pushed, item) for item, (priority, pushed) in self._live.items()]
        heapq.heapify(self._heap)
