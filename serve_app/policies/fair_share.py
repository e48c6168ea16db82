"""Bounds any replica's share of the latest placements, whatever is predicted: the last guard against a stampede."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection


class FairShare:
    """Counts placements over a sliding window.

    Args:
        window_s: how far back placements count.
        most: a replica's largest share as a multiple of the fair one.
        min_per_replica: with fewer placements per replica in the window everything is allowed: two requests on one
            of eight replicas are no stampede.
    """

    def __init__(self, window_s: float, most: float, min_per_replica: float) -> None:
        self._window_s = window_s
        self._most = most
        self._min_per_replica = min_per_replica
        self._placements: deque[tuple[float, str]] = deque()
        self._counts: dict[str, int] = {}

    def placed(self, replica_id: str, now_s: float) -> None:
        """Counts a placement."""
        self._placements.append((now_s, replica_id))
        self._counts[replica_id] = self._counts.get(replica_id, 0) + 1

    def allowed(self, replica_ids: Collection[str], now_s: float) -> list[str]:
        """Those of ``replica_ids`` that may get another one now; all of them where none may."""
        while self._placements and self._placements[0][0] < now_s - self._window_s:
            gone = self._placements.popleft()[1]
            self._counts[gone] -= 1
            if not self._counts[gone]:
                del self._counts[gone]
        total = len(self._placements) + 1
        if total < self._min_per_replica * len(replica_ids):
            return list(replica_ids)
        bound = self._most * total / len(replica_ids)
        within = [name for name in replica_ids if self._counts.get(name, 0) + 1 <= bound]
        return within or list(replica_ids)
