"""Snapshots from plain numbers, for the tests of policies."""

from __future__ import annotations

from memory.api import Headroom, KindHeadroom
from worker.api import ExpertResidency, WorkerSnapshot


def snapshot(
    sequence: int,
    time_s: float = 0.0,
    *,
    submitted: int = 0,
    running: int = 0,
    waiting: int = 0,
    waiting_tokens: int = 0,
    max_running: int = 64,
    gap_bytes: int = 1 << 40,
    full: KindHeadroom | None = None,
    prompt_tokens: int = 0,
    finished: int = 0,
    draining: bool = False,
    experts: ExpertResidency | None = None,
    extra: dict[str, float] | None = None,
) -> WorkerSnapshot:
    """A snapshot in which only what a test names differs from an idle replica with ample headroom."""
    return WorkerSnapshot(
        sequence=sequence,
        time_s=time_s,
        num_steps=sequence,
        num_submitted=submitted,
        num_running=running,
        num_waiting=waiting,
        waiting_tokens=waiting_tokens,
        max_running=max_running,
        headroom=Headroom(1 << 40, gap_bytes, {"full": full} if full else {}),
        num_finished=finished,
        prompt_tokens=prompt_tokens,
        draining=draining,
        experts=experts,
        extra=extra or {},
    )


def residency(
    bits: bytes, generation: int, base: int | None = None, layers: int = 2, experts: int = 8
) -> ExpertResidency:
    """A residency map of a toy model, whole or (with ``base``) a delta."""
    return ExpertResidency(layers, experts, generation, bits, base)
