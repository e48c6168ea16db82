"""Follows one request at its engine for its spans: the timeline that came with its events, and what the engine did
meanwhile for all of its requests together."""

from __future__ import annotations

from serve_app.telemetry.tracing import WorkerSpans
from worker.api import Engine, TokenEvent, WorkerSnapshot
from worker.errors import EngineDead


class EngineTrace:
    """Costs an attribute's look per event where the request is not traced. ``before``: the engine when it took it."""

    __slots__ = ("_before", "_engine", "_spans")

    def __init__(self, spans: WorkerSpans, engine: Engine, before: WorkerSnapshot) -> None:
        self._spans = spans
        self._engine = engine
        self._before = before

    def came(self, event: TokenEvent) -> None:
        """An event of it."""
        if not self._spans.is_recording:
            return
        self._spans.told(event.timeline)
        if event.finish_reason is not None:
            self._spans.ended(event.finish_reason, self._meanwhile())

    def left(self) -> None:
        """Nobody listens any more; whether it had ended or not."""
        if self._spans.is_recording:
            self._spans.ended(None, self._meanwhile())

    def _meanwhile(self) -> dict[str, float]:
        """What the worker did from then to now, for this request and its neighbours."""
        try:
            now = self._engine.snapshot()
        except EngineDead:
            return {}
        before = self._before
        facts: dict[str, float] = {
            "steps": now.num_steps - before.num_steps,
            "retractions": now.num_retractions - before.num_retractions,
            "running": now.num_running,
        }
        if now.experts is not None:
            facts["expert_hits"] = now.expert_hits - before.expert_hits
            facts["expert_misses"] = now.expert_misses - before.expert_misses
            facts["expert_missed_bytes"] = now.expert_bytes_paged - before.expert_bytes_paged
        return facts
