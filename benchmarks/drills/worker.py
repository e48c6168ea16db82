"""A Worker that can be told to misbehave, for drills only."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from serve_app.deployments.worker import Worker


class DrillWorker(Worker):
    """A Worker whose pushes can be stopped."""

    async def mute(self, replica_id: str, seconds: float) -> None:
        """Pushes nothing for so long; everything else goes on."""
        usual = self._args
        self._args = replace(usual, snapshot_interval_s=seconds)
        # The pushing loop reads its interval once a turn, and heartbeats are due at least every half second.
        await asyncio.sleep(2 * usual.snapshot_interval_s + 0.1)
        self._args = usual
