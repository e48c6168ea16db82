"""A Worker that can be told to misbehave and says what reached it, for drills only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from serve_app.deployments import ray_hooks
from serve_app.deployments.protocol import StreamItem
from serve_app.deployments.trunk import Moved, SeatPlace
from serve_app.deployments.worker import Worker
from worker.api import GenerateRequest


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The conversations whose requests reached a worker, in order, and how many of them another one was meant for."""

    replica: str
    affinity_keys: tuple[str, ...]
    num_astray: int


class DrillWorker(Worker):
    """A Worker whose pushes can be stopped, and that remembers which requests reached it."""

    async def generate(
        self, replica_id: str, request: GenerateRequest, place: SeatPlace | None = None
    ) -> AsyncIterator[StreamItem | Moved]:
        """As any Worker does, and notes the request."""
        if not hasattr(self, "_keys"):
            self._keys: list[str] = []
            self._num_astray = 0
        self._keys.append(request.affinity_key)
        self._num_astray += replica_id != ray_hooks.own_replica_id()
        async with aclosing(cast("Any", super().generate(replica_id, request, place))) as items:
            async for item in items:
                yield item

    async def arrivals(self, replica_id: str) -> Arrivals:
        """What has come so far."""
        keys = tuple(getattr(self, "_keys", ()))
        return Arrivals(ray_hooks.own_replica_id(), keys, getattr(self, "_num_astray", 0))

    async def mute(self, replica_id: str, seconds: float) -> None:
        """Pushes nothing for so long; everything else goes on."""
        usual = self._args
        self._args = replace(usual, snapshot_interval_s=seconds)
        # The pushing loop reads its interval once a turn, and heartbeats are due at least every half second.
        await asyncio.sleep(2 * usual.snapshot_interval_s + 0.1)
        self._args = usual
