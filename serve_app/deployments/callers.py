"""Remembers which Router asked a worker for which request, and which of them may be gone.

A Router that was killed cannot cancel what it asked for, and Ray lets a call run on whose caller died. A Router is
suspected when it was missing for some time among those that took the worker's pushes. That is no proof: one that Serve
is taking away gets no pushes either, and has streams to finish. Only pushes that every Router took are counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

MISSING_S = 3.0
"""A new Router may ask before the worker's pushes reach it."""


class Callers:
    """The Routers of one worker's requests."""

    def __init__(self) -> None:
        self._router: dict[str, str] = {}
        self._missing_since_s: dict[str, float] = {}

    def took(self, router_id: str, request_id: str) -> None:
        """The worker works on a Router's request."""
        self._router[request_id] = router_id

    def ended(self, request_id: str) -> None:
        """A request is over; unknown ones are ignored."""
        self._router.pop(request_id, None)

    def requests_of(self, router_id: str) -> list[str]:
        """The requests that a Router has here."""
        return [request for request, router in self._router.items() if router == router_id]

    def missing(self, living: Collection[str], others: Iterable[str], now_s: float) -> set[str]:
        """Which Routers have been missing for some time: of those with requests here and of ``others``, given all that
        took a push now."""
        absent = {*self._router.values(), *others} - set(living)
        self._missing_since_s = {router: self._missing_since_s.get(router, now_s) for router in absent}
        return {router for router, at_s in self._missing_since_s.items() if now_s - at_s >= MISSING_S}
