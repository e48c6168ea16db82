"""The Worker deployment: one engine, its streams to Routers, its reports and its health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from serve_app.config import own_otlp_settings
from serve_app.deployments import ray_hooks
from serve_app.deployments.engine_server import EngineServer
from serve_app.deployments.protocol import StreamItem, WorkerReport
from serve_app.deployments.trunk import Moved, SeatPlace
from serve_app.policies.autoscaling import autoscaling_stats
from serve_app.policies.coalescing import CoalescingConfig
from serve_app.telemetry.logging import configure_logging
from serve_app.telemetry.push import WorkerPush, otlp_exporter, push_reader, resource_of
from serve_app.telemetry.tracing import Tracing
from serve_app.telemetry.worker_metrics import WorkerState
from serve_app.text.model_folder import resolve_model
from worker.api import Engine, GenerateRequest, WorkerSnapshot
from worker.config import WorkerConfig
from worker.engines import ENGINES
from worker.errors import EngineDead

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
"""An idle worker reports so often; a report that is older than 1 s loses trust."""


@dataclass(frozen=True)
class WorkerArgs:
    """What a Worker is told: the engine's settings and how it speaks to Routers."""

    config: WorkerConfig
    revision: str
    snapshot_interval_s: float
    coalescing: CoalescingConfig
    log_level: str


class Worker:
    """One replica: one engine on one GPU."""

    async def __init__(self, args: WorkerArgs) -> None:  # type: ignore[misc]
        configure_logging(args.log_level)
        self._args = args
        self._num_streams = 0
        # Loading takes minutes for large models; the event loop stays free for Serve meanwhile.
        self._engine: Engine = await asyncio.to_thread(_load_engine, args)
        self._server = EngineServer(self._engine, args.coalescing, Tracing.of_process())
        self._push = _metrics_push(self._engine)
        self._reports = asyncio.create_task(self._report_for_ever())

    async def generate(
        self, replica_id: str, request: GenerateRequest, place: SeatPlace | None = None
    ) -> AsyncIterator[StreamItem | Moved]:
        """See :meth:`EngineServer.generate`; ``replica_id`` is for the request router alone."""
        async with aclosing(cast("Any", self._server.generate(request, place))) as items:
            async for item in items:
                yield item

    async def trunk(self, replica_id: str, trunk_id: str) -> AsyncIterator[bytes]:
        """See :meth:`EngineServer.trunk`."""
        async with aclosing(cast("Any", self._server.trunk(trunk_id))) as messages:
            async for message in messages:
                yield message

    async def snapshot(self, replica_id: str) -> WorkerSnapshot:
        """The engine's state now."""
        return self._engine.snapshot()

    # Called by Routers and, through them, by operators. ``replica_id`` is for the request router alone.

    async def worker_report(self, replica_id: str) -> WorkerReport:
        """What would be pushed now, for a Router that pushes do not reach."""
        return WorkerReport(ray_hooks.own_replica_id(), self._engine.model, self._engine.snapshot())

    async def engine_report(self, replica_id: str, name: str) -> Any:
        """See :meth:`EngineServer.report`."""
        return await self._server.report(name)

    async def flush_prefixes(self, replica_id: str) -> int | None:
        """See :meth:`EngineServer.flush_prefixes`."""
        return await self._server.flush_prefixes()

    async def drain(self, replica_id: str, timeout_s: float) -> int:
        """See :meth:`EngineServer.drain`; Serve starts another replica in its place afterwards."""
        return await self._server.drain(timeout_s)

    def check_health(self) -> None:
        """Called by Serve; raises EngineDead, upon which Serve replaces the replica."""
        if self._reports.done():
            raise EngineDead("The worker's reports have stopped.")
        self._server.check_health()

    def record_routing_stats(self) -> dict[str, float]:
        """Serve's own slow channel; shows in its metrics."""
        snapshot = self._engine.snapshot()
        return {
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "available_bytes": snapshot.headroom.available_bytes,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the scaling policy."""
        return autoscaling_stats(self._engine.snapshot())

    async def _report_for_ever(self) -> None:
        routers = ray_hooks.Broadcast("Router", "report")
        replica_id = ray_hooks.own_replica_id()
        last_key: tuple[object, ...] = ()
        last_s = 0.0
        while True:
            await asyncio.sleep(self._args.snapshot_interval_s)
            try:
                snapshot = self._engine.snapshot()
                key = _what_matters(snapshot)
                if key == last_key and time.monotonic() - last_s < HEARTBEAT_S:
                    continue
                heard = await routers.send(WorkerReport(replica_id, self._engine.model, snapshot))
                if heard.answers:
                    last_key, last_s = key, time.monotonic()
                if heard.by_all:
                    await self._give_up_for_dead_routers(self._server.missing_routers(heard.answers, last_s))
            except Exception:
                logger.exception("a report could not be sent")
                await asyncio.sleep(HEARTBEAT_S)

    async def _give_up_for_dead_routers(self, missing: set[str]) -> None:
        # One that finishes its streams while Serve takes it away is missing, too, and lives.
        lives = {name: await asyncio.to_thread(ray_hooks.replica_lives, "Router", name) for name in missing}
        if left := self._server.give_up_for([name for name, is_there in lives.items() if not is_there]):
            logger.warning("%d requests of a router that is gone were ended", left)

    async def __del__(self) -> None:
        # Serve calls and awaits this at the end of a replica, after its requests are done or timed out.
        self._reports.cancel()
        if self._push is not None:
            await asyncio.to_thread(self._push.close)
        await asyncio.to_thread(self._engine.close)


def _load_engine(args: WorkerArgs) -> Engine:
    folder = resolve_model(args.config.model, args.revision, weights=args.config.load == "checkpoint")
    config = replace(args.config, model=str(folder))
    engine: Engine = ENGINES.load(config.engine)(config)
    logger.info("engine %s serves %s from %s", config.engine, engine.model.name, folder)
    return engine


def _metrics_push(engine: Engine) -> WorkerPush | None:
    """Pushes the engine's figures where a collector is named: Routers push their own alone."""
    settings = own_otlp_settings()
    if not settings.pushes_metrics:
        return None
    replica_id = ray_hooks.own_replica_id()
    resource = resource_of(settings, "worker", replica_id, ray_hooks.versions()[0])
    return WorkerPush(
        lambda: WorkerState(engine.model.name, replica_id, 0.0, engine.snapshot()),
        [push_reader(otlp_exporter(settings))],
        resource,
    )


def _what_matters(snapshot: WorkerSnapshot) -> tuple[object, ...]:
    """What a Router decides by; a report is due when it changed."""
    return (
        snapshot.num_steps,
        snapshot.num_submitted,
        snapshot.num_running,
        snapshot.num_waiting,
        snapshot.draining,
    )
