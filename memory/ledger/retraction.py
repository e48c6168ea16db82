"""Chooses which running request is sent back when memory runs out, prices that choice, and measures how often it
happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetractionCandidate:
    """A running request that could be sent back.

    Attributes:
        request: its number.
        num_known_tokens: prompt and output so far: what must be in memory again to go on.
        num_cached_tokens: how many of them the prefix tree or the host tier will still bring.
        release_bytes: bytes that come free: pages that nobody shares.
        arrival: order of arrival; of two equal choices the later one goes.
    """

    request: int
    num_known_tokens: int
    num_cached_tokens: int
    release_bytes: int
    arrival: int


def retraction_cost(candidate: RetractionCandidate) -> int:
    """Tokens that must be computed again."""
    return max(0, candidate.num_known_tokens - candidate.num_cached_tokens)


def choose_victim(
    candidates: Iterable[RetractionCandidate], missing_bytes: int
) -> RetractionCandidate | None:
    """The cheapest request whose release brings ``missing_bytes``; if no single one does, the one that brings most
    bytes per token to be computed again. None where no release brings any byte.

    The oldest candidate is never chosen while others are there, so that some request always gets done.
    """
    able = [c for c in candidates if c.release_bytes > 0]
    if len(able) > 1:
        oldest = min(able, key=lambda c: c.arrival)
        able.remove(oldest)
    if not able:
        return None
    enough = [c for c in able if c.release_bytes >= missing_bytes]
    if enough:
        return min(enough, key=lambda c: (retraction_cost(c), -c.arrival))
    return max(able, key=lambda c: (c.release_bytes / (1 + retraction_cost(c)), c.arrival))


class RetractionRate:
    """Retractions per second and per 1,000 finished requests over the last ``window_s`` seconds."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._retracted: deque[float] = deque()
        self._finished: deque[float] = deque()
        self.num_retractions = 0
        self.num_finished = 0

    def retracted(self, now_s: float) -> None:
        """A request was sent back."""
        self._retracted.append(now_s)
        self.num_retractions += 1

    def finished(self, now_s: float) -> None:
        """A request ended."""
        self._finished.append(now_s)
        self.num_finished += 1

    def per_second(self, now_s: float) -> float:
        """Retractions per second over the window that ends at ``now_s``."""
        self._expire(now_s)
        return len(self._retracted) / self._window_s

    def per_thousand(self, now_s: float) -> float:
        """Retractions per 1,000 requests finished in the window; per 1,000 of one where none has."""
        self._expire(now_s)
        return 1000.0 * len(self._retracted) / max(1, len(self._finished))

    def _expire(self, now_s: float) -> None:
        for times in (self._retracted, self._finished):
            while times and times[0] <= now_s - self._window_s:
                times.popleft()
