"""How long a step that changed hands of memory took beyond what its work explains."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A decode step: its rows, seconds, the bytes it read over the link, and the bytes of places that it banned."""

    num_rows: int
    seconds: float
    link_bytes: int
    banned_bytes: int


def max_stall_s(steps: Sequence[StepFacts], link_bytes_per_s: float) -> float:
    """The worst of the steps that banned places: its seconds beyond those of steps of as many rows that did not, each
    less the link's time for what it missed. 0 where no step can be compared."""
    calm: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if not step.banned_bytes:
            calm[step.num_rows].append(step.seconds - step.link_bytes / link_bytes_per_s)
    stalls = [
        step.seconds - step.link_bytes / link_bytes_per_s - statistics.median(calm[step.num_rows])
        for step in steps
        if step.banned_bytes and len(calm[step.num_rows]) >= 3
    ]
    return max(stalls, default=0.0)
