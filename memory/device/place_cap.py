"""Keeps the places in use at a fixed number: of those the ledger allows, at most ``limit`` are handed to the device."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import PlaceRange
from memory.ledger.spans import Span, common, merged, total, without


class PlaceCap:
    """Turns the ledger's bans and allows into the device's, so that at most ``limit`` places are ever usable."""

    def __init__(self, limit: int | None) -> None:
        """None: no limit."""
        self._limit = limit
        self._allowed: list[Span] = []
        self._used: list[Span] = []

    @property
    def num_places(self) -> int:
        """Places the device may use."""
        return total(self._used)

    def lower(self, limit: int) -> None:
        """At most ``limit`` places from the next update on."""
        self._limit = limit if self._limit is None else min(self._limit, limit)

    def update(
        self, ban: Sequence[PlaceRange], allow: Sequence[PlaceRange]
    ) -> tuple[tuple[PlaceRange, ...], tuple[PlaceRange, ...]]:
        """The device's bans and allows after the ledger's. Places in use stay in use while they are allowed."""
        banned = merged((r.first, r.last) for r in ban)
        self._allowed = merged([*without(self._allowed, banned), *((r.first, r.last) for r in allow)])
        before = self._used
        used = common(before, self._allowed)
        if self._limit is not None and total(used) > self._limit:
            used = merged(_middles(used, self._limit))
        spare = without(self._allowed, used)
        left = None if self._limit is None else self._limit - total(used)
        used = merged([*used, *_middles(spare, left)])
        self._used = used
        return _ranges(without(before, used)), _ranges(without(used, before))


def _middles(spans: list[Span], count: int | None) -> list[Span]:
    """``count`` places out of the middles of the longest spans: bands grow from the ends."""
    if count is None:
        return spans
    found = []
    for low, high in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        taken = min(count, high - low)
        if taken <= 0:
            break
        start = low + (high - low - taken) // 2
        found.append((start, start + taken))
        count -= taken
    return found


def _ranges(spans: list[Span]) -> tuple[PlaceRange, ...]:
    return tuple(PlaceRange(low, high) for low, high in spans)
