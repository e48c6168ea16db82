"""How long decode steps took beyond their in-layer limit when memory changed hands, and what the worst contained."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from benchmarks.limits import LinkCurve, in_layer_step_s

LEAST_CALM = 3
"""Undisturbed steps of as many rows; with fewer nothing is known of them."""
ATTENTION_SPAN = 2.0
"""A token of context is read in at least its bytes' time and at most so many times that."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A decode step: what it was given to do, and what the device had counted by its end.

    Attributes:
        step: its number.
        num_rows, kv_tokens: rows, and tokens of their contexts in all.
        seconds: of the device; on a CPU of the processor.
        hits, misses: experts of each layer that were resident, and that came over the link.
        banned_bytes: of places that it, or a pass launched since the step before, took from experts.
        allowed_bytes, rescued_bytes, ring_bytes: given to experts; carried over from banned places; brought for prompts
            meanwhile, as far as it was counted.
        num_moves, num_copies, num_patches: pages moved and copied ahead of it, and changes of tables.
        beside_pass: a prefill pass had layers left.
        captured: a graph was replayed.
        host_s, commands_s: the host's time to launch it, and of that for memory's commands.
        collected_s: that Python's collector took since the step before.
    """

    step: int
    num_rows: int
    kv_tokens: int
    seconds: float
    hits: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    banned_bytes: int = 0
    allowed_bytes: int = 0
    rescued_bytes: int = 0
    ring_bytes: int = 0
    num_moves: int = 0
    num_copies: int = 0
    num_patches: int = 0
    beside_pass: bool = False
    captured: bool = False
    host_s: float = 0.0
    commands_s: float = 0.0
    collected_s: float = 0.0

    @property
    def is_calm(self) -> bool:
        """Nothing changed hands, and no pass was beside it."""
        return not (self.banned_bytes or self.beside_pass)


@dataclass(frozen=True, slots=True)
class Machine:
    """What limits are counted by.

    Attributes:
        curve: seconds to bring experts of a layer; None where the link takes none of a step's seconds (simulated).
        block_bytes: of an expert.
        memory_bytes_per_s: at which those that are resident are read; 0: hits hide nothing.
        token_bytes: of a token of context.
    """

    curve: LinkCurve | None = None
    block_bytes: int = 0
    memory_bytes_per_s: float = 0.0
    token_bytes: float = 0.0

    def link_s(self, step: StepFacts) -> float:
        """What a step's misses add to it at least."""
        if self.curve is None:
            return 0.0
        each_s = self.block_bytes / self.memory_bytes_per_s if self.memory_bytes_per_s else 0.0
        return in_layer_step_s(
            0.0, [(n, hit * each_s) for n, hit in zip(step.misses, step.hits, strict=True)], self.curve
        )

    def lines(self) -> list[str]:
        """The same in words; nothing where the link is simulated."""
        if self.curve is None:
            return []
        rates = (
            f"{count} at {count * self.block_bytes / self.curve.seconds(count) / 1e9:.1f} GB/s"
            for count in (1, 64)
        )
        return [
            f"limits of steps: experts of a layer come {', '.join(rates)}, by programs or the copy engine, whichever"
            f" is faster; memory {self.memory_bytes_per_s / 1e12:.2f} TB/s"
        ]

    @property
    def token_s(self) -> tuple[float, float]:
        """Least and most seconds that a token of context takes."""
        least = self.token_bytes / self.memory_bytes_per_s if self.memory_bytes_per_s else 0.0
        return (least, ATTENTION_SPAN * least) if least else (0.0, inf)


@dataclass(frozen=True, slots=True)
class Resident:
    """What steps take whose experts are all resident: by rows, and for each token of context."""

    base_s: dict[int, float]
    token_s: float

    def seconds(self, step: StepFacts) -> float | None:
        """Of such a step; of fewer rows where none of as many was seen, None where nothing was."""
        rows = max((rows for rows in self.base_s if rows <= step.num_rows), default=None)
        return None if rows is None else self.base_s[rows] + self.token_s * step.kv_tokens


@dataclass(frozen=True, slots=True)
class Stall:
    """A step and the parts of its limit."""

    step: StepFacts
    resident_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        """Beyond the limit."""
        return self.step.seconds - self.resident_s - self.link_s

    def line(self) -> str:
        """The step in words."""
        step = self.step
        layers = sum(1 for count in step.misses if count)
        beside = f" beside a pass ({step.ring_bytes / 1e6:.0f} MB for it)" if step.beside_pass else ""
        how = "replayed" if step.captured else "eager"
        parts = (
            f"step {step.step}: {1e3 * self.seconds:+.2f} ms = {1e3 * step.seconds:.2f} - resident"
            f" {1e3 * self.resident_s:.2f} - link {1e3 * self.link_s:.2f}"
            f" ({sum(step.misses)} misses in {layers} layers)",
            f"{step.num_rows} rows, {step.kv_tokens} tokens of context, {how}{beside}",
            f"banned {step.banned_bytes / 1e6:.0f} MB, rescued {step.rescued_bytes / 1e6:.0f},"
            f" allowed {step.allowed_bytes / 1e6:.0f}",
            f"{step.num_moves} moves, {step.num_copies} copies, {step.num_patches} patches",
            f"host {1e3 * step.host_s:.2f} ms, commands {1e3 * step.commands_s:.2f},"
            f" collector {1e3 * step.collected_s:.2f}",
        )
        return "; ".join(parts)


def fit_resident(steps: Sequence[StepFacts], machine: Machine) -> Resident:
    """By least squares over calm steps: their seconds less the link's part are a base for their rows, so much for each
    token of context, and so much for each layer that missed anything, which no resident step has."""
    calm = [step for step in steps if step.is_calm]
    groups: dict[int, list[int]] = defaultdict(list)
    for at, step in enumerate(calm):
        groups[step.num_rows].append(at)
    rows = sorted(count for count, members in groups.items() if len(members) >= LEAST_CALM)
    if not rows:
        return Resident({}, 0.0)
    kept = [step for step in calm if step.num_rows in rows]
    beyond = np.array([step.seconds - machine.link_s(step) for step in kept])
    tokens = np.array([float(step.kv_tokens) for step in kept])
    missing = np.array([float(sum(1 for count in step.misses if count)) for step in kept])
    table = np.array([[float(step.num_rows == count) for count in rows] for step in kept])
    token_s, layer_s = _slopes(table, tokens, missing, beyond)
    token_s = min(max(token_s, machine.token_s[0]), machine.token_s[1])
    rest = beyond - token_s * tokens - max(0.0, layer_s) * missing
    return Resident(
        {count: statistics.median(rest[table[:, at] > 0].tolist()) for at, count in enumerate(rows)}, token_s
    )


def _slopes(
    table: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.float64],
    missing: npt.NDArray[np.float64],
    beyond: npt.NDArray[np.float64],
) -> tuple[float, float]:
    """Seconds per token and per layer with misses; 0 where steps do not differ in it."""
    scale = max(1.0, float(tokens.max()))
    columns = np.column_stack([table, tokens / scale, missing])
    found = np.linalg.lstsq(columns, beyond, rcond=None)[0]
    return float(found[-2]) / scale, float(found[-1])


def find_stalls(steps: Sequence[StepFacts], machine: Machine, calm: bool = False) -> list[Stall]:
    """Of the steps that banned places, the worst first; those that cannot be compared are left out. ``calm``: of calm
    steps in their place, which says what such steps differ by anyway."""
    resident = fit_resident(steps, machine)
    found = []
    for step in steps:
        resident_s = resident.seconds(step) if (step.is_calm if calm else step.banned_bytes) else None
        if resident_s is not None:
            found.append(Stall(step, resident_s, machine.link_s(step)))
    return sorted(found, key=lambda stall: -stall.seconds)
