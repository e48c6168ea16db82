"""Keeps the expert grid: which places are usable, banned (a band or a ring has the bytes) or draining (free again, but
bytes still being read), and tells the device what to ban and what to allow."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import PlaceRange
from memory.ledger.spans import Span, common, merged, total, without


class ExpertPlaces:
    """Places ``[p * place_bytes, (p + 1) * place_bytes)`` over the whole arena.

    A device starts with every place banned; the first :meth:`update` allows the gap.
    """

    def __init__(self, arena_bytes: int, place_bytes: int) -> None:
        self.place_bytes = place_bytes
        self.num_places = arena_bytes // place_bytes if place_bytes else 0
        self._covered: list[Span] = [(0, self.num_places)] if self.num_places else []
        self._draining: list[tuple[int, Span]] = []  # (step after which it may be allowed, places)

    @property
    def num_usable(self) -> int:
        """Places that experts may use as of the last update."""
        return self.num_places - total(self._covered) - self.num_draining

    @property
    def num_draining(self) -> int:
        """Places on their way back to the experts."""
        return sum(high - low for _, (low, high) in self._draining)

    def usable(self) -> list[Span]:
        """The usable places."""
        return without([(0, self.num_places)], self.banned())

    def banned(self) -> list[Span]:
        """Places that the device must not use: covered or draining."""
        return merged([*self._covered, *(span for _, span in self._draining)])

    def covering(self, blocks: Sequence[Span]) -> list[Span]:
        """The places that byte ranges touch."""
        size = self.place_bytes
        spans = merged((low // size, -(-high // size)) for low, high in blocks)
        return common(spans, [(0, self.num_places)])

    def update(
        self, blocks: Sequence[Span], read: Sequence[Span], step: int, completed_step: int
    ) -> tuple[tuple[PlaceRange, ...], tuple[PlaceRange, ...]]:
        """Ban and allow ranges for ``step``.

        ``blocks``: byte ranges that bands and rings have now. ``read``: byte ranges that moves of this
        step or of steps in flight still read; places over them drain until ``step`` has finished.
        """
        if not self.num_places:
            return (), ()
        covered = self.covering(blocks)
        ban = without(covered, self.banned())
        freed = without(self._covered, covered)
        hot = self.covering(read)
        drained = [(due, span) for due, old in self._draining for span in without([old], covered)]
        drained += [(step, span) for span in common(freed, hot)]
        drained += [(completed_step, span) for span in without(freed, hot)]
        self._draining = [(due, span) for due, span in drained if due > completed_step]
        allow = merged(span for due, span in drained if due <= completed_step)
        self._covered = covered
        return tuple(PlaceRange(*span) for span in ban), tuple(PlaceRange(*span) for span in allow)
