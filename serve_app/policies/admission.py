"""Decides who waits in a Router: a bounded queue in order of arrival, with deadlines and an honest Retry-After.

The Router offers every request, takes the next one when a replica can have it, and puts it back when none could
after all. Each entry is known by the caller's own key::

    queue = AdmissionQueue(AdmissionConfig())
    refused = queue.offer(key, now_s, deadline_s)      # None, or Refused(reason, retry_after_s): answer 429
    key = queue.take(now_s)                            # the next one, or None
    queue.put_back(key)                                # placement said Busy: first again, deadline kept
    queue.served(key, now_s)                           # it was placed: the wait is learned from
    queue.leave(key)                                   # its client left
    late = queue.expire(now_s)                         # keys past their deadline: answer 503 or 429
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

RATE_WEIGHT = 0.1


class RefusalReason(Enum):
    """Why a request may not wait."""

    QUEUE_FULL = "queue full"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds of the queue: ``max_waiting`` requests; ``default_wait_s`` is the deadline of those that name none;
    Retry-After lies between ``min_retry_s`` and ``max_retry_s``."""

    max_waiting: int = 1_024
    default_wait_s: float = 60.0
    min_retry_s: float = 1.0
    max_retry_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Refused:
    """Not admitted; worth trying again after so many seconds."""

    reason: RefusalReason
    retry_after_s: float


@dataclass(slots=True)
class _Waiting:
    arrived_s: float
    deadline_s: float


class AdmissionQueue:
    """The admission queue of one Router. Not thread-safe: its event loop owns it."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._taken: dict[str, _Waiting] = {}
        self._gap_s: float | None = None
        self._last_served_s: float | None = None
        self.wait_s = 0.0
        """Moving mean of the seconds that placed requests had waited."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken)

    def offer(self, key: str, now_s: float, deadline_s: float | None = None) -> Refused | None:
        """Admits a request to the queue, or says why not. ``deadline_s`` is a time, not a span.

        Raises ValueError for a key that waits already.
        """
        if key in self._waiting or key in self._taken:
            raise ValueError(f"request {key!r} waits already")
        if len(self) >= self._config.max_waiting:
            return Refused(RefusalReason.QUEUE_FULL, self.retry_after_s())
        if deadline_s is None:
            deadline_s = now_s + self._config.default_wait_s
        # One that cannot be served in time is told so now, while its client can still go elsewhere.
        if deadline_s <= now_s or (self._gap_s is not None and now_s + len(self) * self._gap_s > deadline_s):
            return Refused(RefusalReason.DEADLINE, self.retry_after_s())
        self._waiting[key] = _Waiting(now_s, deadline_s)
        return None

    def take(self, now_s: float) -> str | None:
        """The next request in order whose deadline is not past; it still counts until served, put back or gone."""
        for key, waiting in self._waiting.items():
            if waiting.deadline_s > now_s:
                self._taken[key] = self._waiting.pop(key)
                return key
        return None

    def put_back(self, key: str) -> None:
        """A taken request could not be placed: it is first again. Ignored if it left meanwhile."""
        if (waiting := self._taken.pop(key, None)) is not None:
            self._waiting[key] = waiting
            self._waiting.move_to_end(key, last=False)

    def served(self, key: str, now_s: float) -> None:
        """A taken request was placed."""
        waiting = self._taken.pop(key, None)
        if waiting is None:
            return
        self.wait_s += RATE_WEIGHT * (now_s - waiting.arrived_s - self.wait_s)
        # Only gaps under which somebody waited tell how fast the replicas take requests.
        if self._last_served_s is not None and waiting.arrived_s <= self._last_served_s:
            gap_s = now_s - self._last_served_s
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + RATE_WEIGHT * (gap_s - self._gap_s)
        elif self._gap_s is not None and not self._waiting:
            # Nobody waits any more: what was learned in the rush no longer refuses anyone.
            self._gap_s = None
        self._last_served_s = now_s

    def leave(self, key: str) -> bool:
        """The client left; False if the request was not here."""
        return (self._waiting.pop(key, None) or self._taken.pop(key, None)) is not None

    def expire(self, now_s: float) -> list[str]:
        """Removes and answers those whose deadline is past."""
        late = [key for key, waiting in self._waiting.items() if waiting.deadline_s <= now_s]
        for key in late:
            del self._waiting[key]
        return late

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the first one has waited; 0 for an empty queue."""
        first = next(iter(self._waiting.values()), None)
        return now_s - first.arrived_s if first is not None else 0.0

    def retry_after_s(self) -> float:
        """Seconds after which the queue as it is now will have been placed, within the bounds."""
        gap_s = self._gap_s if self._gap_s is not None else 0.0
        return min(self._config.max_retry_s, max(self._config.min_retry_s, len(self) * gap_s))
