"""States what a worker is doing as a value for the router."""

from __future__ import annotations

from collections.abc import Iterable

from memory.api import Ledger, PageKind, PageSpec
from worker.api import WorkerSnapshot
from worker.scheduling.scheduler import Scheduler


def take_snapshot(
    scheduler: Scheduler, ledger: Ledger, sequence: int, num_steps: int, now_s: float, draining: bool
) -> WorkerSnapshot:
    """The scheduler and its ledger now. Belongs to the loop's thread.

    ``queue_wait_s`` is the mean wait of those admitted lately, or the age of the head of the queue if that is more:
    a queue that stands still shows.
    """
    counts = scheduler.statistics
    head = scheduler.waiting.peek()
    oldest_s = now_s - head.waiting_since_s if head is not None else 0.0
    return WorkerSnapshot(
        sequence=sequence,
        time_s=now_s,
        num_steps=num_steps,
        num_submitted=counts.num_submitted,
        num_running=scheduler.rows.num_running,
        num_waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting.num_tokens,
        max_running=scheduler.limits.max_running,
        headroom=ledger.headroom(),
        num_finished=counts.retractions.num_finished,
        num_aborted=counts.num_aborted,
        num_retractions=counts.retractions.num_retractions,
        retraction_rate=counts.retractions.per_second(now_s),
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        queue_wait_s=max(oldest_s, counts.queue_waits.mean(now_s)),
        step_s=counts.step_times.mean(now_s),
        draining=draining,
        extra={
            "retractions_per_thousand": counts.retractions.per_thousand(now_s),
            "kv_bytes_per_token": _token_bytes(ledger.specs.values()),
        },
    )


def _token_bytes(specs: Iterable[PageSpec]) -> float:
    """Bytes that each token of a request holds to its end: those of its FULL pages."""
    return sum(spec.page_bytes / spec.page_tokens for spec in specs if spec.kind is PageKind.FULL)
