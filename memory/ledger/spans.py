"""Arithmetic on sorted, disjoint half-open ranges of ints (bytes or expert places)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union as sorted, disjoint, non-touching spans."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if low >= high:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def without(spans: list[Span], taken: list[Span]) -> list[Span]:
    """What of ``spans`` is not in ``taken``; both sorted and disjoint."""
    left: list[Span] = []
    for low, high in spans:
        for taken_low, taken_high in taken:
            if taken_high <= low or taken_low >= high:
                continue
            if taken_low > low:
                left.append((low, taken_low))
            low = max(low, taken_high)
        if low < high:
            left.append((low, high))
    return left


def common(spans: list[Span], others: list[Span]) -> list[Span]:
    """What is in both."""
    return without(spans, without(spans, others))


def total(spans: Iterable[Span]) -> int:
    """Sum of the lengths."""
    return sum(high - low for low, high in spans)


class SpanSet:
    """A growing union that answers whether a range touches it."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []

    def add(self, low: int, high: int) -> None:
        """Unites with ``[low, high)``."""
        first = bisect_left(self._highs, low)
        last = first
        while last < len(self._lows) and self._lows[last] <= high:
            last += 1
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]

    def touches(self, low: int, high: int) -> bool:
        """Whether any byte of ``[low, high)`` is in the set."""
        first = bisect_left(self._highs, low + 1)
        return first < len(self._lows) and self._lows[first] < high

    def spans(self) -> list[Span]:
        """The set as spans."""
        return list(zip(self._lows, self._highs, strict=True))

    def clear(self) -> None:
        """Empties the set."""
        self._lows.clear()
        self._highs.clear()
