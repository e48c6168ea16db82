"""Who is admitted next: requests that were sent back, in order of arrival, then new ones, first come first served."""

from __future__ import annotations

import heapq
from collections import deque

from worker.scheduling.request import Request, Status

MOST_ENDED = 64
"""Ended requests that may lie between those that wait, or as many as wait, if that is more."""


class WaitingQueue:
    """Strictly in order: nobody overtakes the head, so a long prompt cannot starve behind short ones."""

    def __init__(self) -> None:
        self._fresh: deque[Request] = deque()
        self._returned: list[tuple[int, Request]] = []
        self._count = self._num_ended = 0
        self.num_tokens = 0
        """tokens to compute before all of them have caught up"""

    def __len__(self) -> int:
        return self._count

    def append(self, request: Request) -> None:
        """A new request, behind all others."""
        self._fresh.append(request)
        self._entered(request)

    def put_back(self, request: Request) -> None:
        """A request that was sent back, ahead of all new ones."""
        request.status = Status.WAITING
        heapq.heappush(self._returned, (request.number, request))
        self._entered(request)

    def _entered(self, request: Request) -> None:
        self._count += 1
        self.num_tokens += request.num_known

    def remove(self, request: Request) -> None:
        """Takes out a waiting request, wherever it stands; it must still be WAITING, and is ENDED then."""
        # It stays in its container until it comes to the head, or many have ended: aborts cost no search.
        request.status = Status.ENDED
        self._left(request)
        self._num_ended += 1
        if self._num_ended > max(MOST_ENDED, self._count):
            self._drop_ended()

    def _drop_ended(self) -> None:
        self._fresh = deque(request for request in self._fresh if request.status is Status.WAITING)
        self._returned = [entry for entry in self._returned if entry[1].status is Status.WAITING]
        heapq.heapify(self._returned)
        self._num_ended = 0

    def _left(self, request: Request) -> None:
        self._count -= 1
        self.num_tokens -= request.num_known

    def peek(self) -> Request | None:
        """The next request, left in place."""
        while self._returned and self._returned[0][1].status is not Status.WAITING:
            heapq.heappop(self._returned)
            self._num_ended -= 1
        if self._returned:
            return self._returned[0][1]
        while self._fresh and self._fresh[0].status is not Status.WAITING:
            self._fresh.popleft()
            self._num_ended -= 1
        return self._fresh[0] if self._fresh else None

    def pop(self) -> Request:
        """Takes the next request, which is RUNNING then."""
        request = self.peek()
        if request is None:
            raise IndexError("nobody waits")
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._fresh.popleft()
        request.status = Status.RUNNING
        self._left(request)
        return request
