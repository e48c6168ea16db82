"""Decides which attention backend serves decode steps of each captured size, by times measured at start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NOISE = 0.02
"""Times that are apart by less, as a share of a size's best, are equal."""
SWITCH = 0.03
"""What leaving a backend from one size to the next must gain beyond, as such shares in all."""


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds that a group's layers take in a decode step of ``rows`` rows with ``context`` tokens each, in a graph for
    contexts of up to ``bound`` tokens, by the backends that ran."""

    rows: int
    bound: int
    context: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """A backend for every size of one group's decode steps: ``names`` belong to ``times``, which ascend in bounds, then
    in rows. Without times it is ``base`` for all."""

    base: str
    times: tuple[DecodeTimes, ...] = ()
    names: tuple[str, ...] = ()

    def name(self, rows: int, bound: int) -> str:
        """The backend of a step padded to so much: as of the next larger size that was measured, or the largest."""
        if not self.times:
            return self.base
        bounds = sorted({entry.bound for entry in self.times})
        near = next((known for known in bounds if known >= bound), bounds[-1])
        sizes = [
            (entry.rows, name)
            for entry, name in zip(self.times, self.names, strict=True)
            if entry.bound == near
        ]
        return next((name for known, name in sizes if known >= rows), sizes[-1][1])

    def line(self) -> str:
        """The choice in words, with the times behind it."""
        if not self.times:
            return f"{self.base} at all sizes, not measured"
        found = []
        for entry, name in zip(self.times, self.names, strict=True):
            others = ", ".join(
                f"{other} {1e6 * seconds:.0f}" for other, seconds in entry.seconds.items() if other != name
            )
            taken = f"{1e6 * entry.seconds[name]:.0f} us" + (f", {others}" if others else "")
            found.append(f"{name} at {entry.rows} x {entry.context} of {entry.bound} ({taken})")
        return "; ".join(found)


def measured_rows(max_running: int) -> tuple[int, ...]:
    """Numbers of rows to measure for steps of at most ``max_running``, ascending."""
    return (*(rows for rows in MEASURED_ROWS if rows < max_running), min(max_running, MEASURED_ROWS[-1]))


def choose_decode(times: Sequence[DecodeTimes], base: str) -> DecodeChoice:
    """The fastest backend of each size, but no change from size to size that gains too little; ``base`` serves all
    other steps, and ties. ValueError where a size has no time of ``base``."""
    for entry in times:
        if base not in entry.seconds:
            raise ValueError(f"{base} was not measured at {entry.rows} rows of {entry.bound}")
    ordered = tuple(sorted(times, key=lambda entry: (entry.bound, entry.rows)))
    names: list[str] = []
    for bound in sorted({entry.bound for entry in ordered}):
        names += _cheapest_path([entry for entry in ordered if entry.bound == bound], base)
    return DecodeChoice(base, ordered, tuple(names))


def _cheapest_path(sizes: Sequence[DecodeTimes], base: str) -> tuple[str, ...]:
    """A backend for each of ``sizes``: least sum of what times are above their sizes' best ones, and of ``SWITCH`` for
    every change, from ``base`` ahead of them and back to it behind them."""
    known = dict.fromkeys([base, *(name for entry in sizes for name in entry.seconds)])
    paths: dict[str, tuple[float, tuple[str, ...]]] = {base: (0.0, ())}
    for entry in sizes:
        best = min(entry.seconds.values())
        longer = {}
        for name in known:
            reached = [
                (cost + (0.0 if before == name else SWITCH), path) for before, (cost, path) in paths.items()
            ]
            cost, path = min(reached, key=lambda found: found[0])
            above = entry.seconds.get(name, math.inf) / best - 1.0
            longer[name] = (cost + (above if above > NOISE else 0.0), (*path, name))
        paths = longer
    return min(paths.items(), key=lambda found: found[1][0] + (0.0 if found[0] == base else SWITCH))[1][1]
