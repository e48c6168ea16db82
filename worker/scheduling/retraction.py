"""Whom to send back when memory is short: the running request whose work is cheapest to do again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that could be sent back.

    Attributes:
        request: its number; numbers grow with the order of arrival.
        recompute_tokens: tokens to compute again when it comes back, prefix hits taken off.
        release_bytes: bytes that come free: pages that nobody shares.
    """

    request: int
    recompute_tokens: int
    release_bytes: int


def choose_victim(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the fewest tokens to compute again per byte that comes free; the latest among equals.

    The earliest request is never chosen: it always gets on, hence every request ends some day.
    """
    if len(candidates) < 2:
        return None
    earliest = min(candidates, key=lambda c: c.request)
    useful = [c for c in candidates if c is not earliest and c.release_bytes > 0]
    if not useful:
        return None
    return min(useful, key=lambda c: (c.recompute_tokens / c.release_bytes, -c.request))
