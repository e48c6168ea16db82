"""The service under drill: deploys it, finds its processes, reads its engines' own counters."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.drills.figures import by_router
from benchmarks.drills.processes import resident, titles
from benchmarks.drills.worker import Arrivals, DrillWorker
from serve_app.build import application
from serve_app.config import AppArgs
from worker.api import Headroom, WorkerSnapshot

SETTLE_S = 20.0
PARTS = ("Router", "Worker")
PAGE_BYTES = 4096
"""In which leaked bytes are counted, rounded up."""


def held_bytes(headroom: Headroom) -> int:
    """Bytes of pages that requests or the prefix cache hold."""
    held = [kind for name, kind in headroom.kinds.items() if name != "expert"]
    return sum(kind.used_bytes + kind.pending_bytes + kind.reclaimable_bytes for kind in held)


@dataclass
class Service:
    """One application on a running Serve. ``address`` is ``http://host:port``; the application is under its name."""

    name: str
    address: str
    options: dict[str, Any]

    @property
    def url(self) -> str:
        """Where its routes begin."""
        return f"{self.address}/{self.name}"

    def deploy(self, **changes: Any) -> None:
        """Deploys it, or deploys it anew with changed options; returns when Serve says that it runs."""
        from ray import serve

        self.options |= changes
        args = AppArgs(**self.options)
        serve.run(application(args, DrillWorker), name=self.name, route_prefix=f"/{self.name}")

    def delete(self) -> None:
        """Takes it away."""
        from ray import serve

        serve.delete(self.name)

    def ask_workers(self, method: str, *given: Any) -> list[Any]:
        """Calls a method of every worker."""
        return list(self._handle().broadcast(method, "", *given).results(timeout_s=60.0))

    def drain(self, replica: str, timeout_s: float) -> int:
        """Drains one worker; how many requests it had to abort."""
        aborted: int = self._handle().drain.remote(replica, timeout_s).result()
        return aborted

    def _handle(self) -> Any:
        from ray import serve

        handle = serve.get_deployment_handle("Worker", self.name)
        if not handle.is_initialized:
            # In throughput mode a handle without a loop of its own can only be used inside one.
            handle._init(_run_router_in_separate_loop=True)
        return handle

    def mute(self, seconds: float) -> None:
        """No worker pushes for so long."""
        self.ask_workers("mute", seconds)

    def snapshots(self) -> list[WorkerSnapshot]:
        """The state of every worker, from the engines themselves."""
        return self.ask_workers("snapshot")

    def arrivals(self) -> list[Arrivals]:
        """Which requests have reached each worker."""
        return self.ask_workers("arrivals")

    def replicas(self) -> list[dict[str, Any]]:
        """What the Router that answers knows of its workers."""
        found: list[dict[str, Any]] = httpx.get(self.url + "/admin/replicas", timeout=10).json()["data"]
        return found

    def settled(self, timeout_s: float = SETTLE_S) -> int:
        """Waits until no worker has a request; answers how many are left."""
        end = time.monotonic() + timeout_s
        while True:
            left = sum(s.num_running + s.num_waiting for s in self.snapshots())
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def leaks(self) -> tuple[int, int]:
        """Bytes, and pages, that idle engines still hold once their prefix caches are empty."""
        self.ask_workers("flush_prefixes")
        held = [held_bytes(snapshot.headroom) for snapshot in self.snapshots()]
        # A page of any kind is of at least one byte; how many there are is told where there are any.
        return sum(held), sum(-(-num_bytes // PAGE_BYTES) for num_bytes in held)

    def open_bookings(self, timeout_s: float = SETTLE_S) -> int:
        """Requests that Routers still count as waiting or placed, after some time at most: their sum over some looks,
        since which Router answers is chance."""
        end = time.monotonic() + timeout_s
        while True:
            pages = [httpx.get(self.url + "/metrics", timeout=10).text for _ in range(8)]
            left = max(
                int(sum(by_router(page, name).values()))
                for page in pages
                for name in ("headroom_queued", "headroom_open")
            )
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.2)

    def wait_until_whole(self, workers: int, routers: int, timeout_s: float) -> float:
        """Returns once there are so many processes of each kind and the Routers have heard of the workers; with the
        seconds it took."""
        began = time.monotonic()
        while True:
            there = len(self.pids("Worker")) == workers and len(self.pids("Router")) == routers
            if there and all(self._knows(workers) for _ in range(4)):
                return time.monotonic() - began
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"the service is not whole after {timeout_s:g} s")
            time.sleep(0.1)

    def _knows(self, workers: int) -> bool:
        try:
            page = httpx.get(self.url + "/metrics", timeout=10).text
        except httpx.HTTPError:
            return False
        known = by_router(page, "headroom_workers").values()
        return bool(known) and all(count == workers for count in known)

    # -- its processes --------------------------------------------------------------------------------------------

    def pids(self, part: str) -> list[int]:
        """Processes of the Router or the Worker deployment, by the title that Ray gives them."""
        return sorted(pid for pid, title in titles() if f"ray::ServeReplica:{self.name}:{part}" in title)

    def kill(self, part: str, index: int = 0) -> int:
        """Kills one process outright; its id."""
        pid = self.pids(part)[index]
        os.kill(pid, signal.SIGKILL)
        return pid

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory by part, shared pages counted by their share; ``proxy`` is what stands in front,
        ``controller`` Serve's own."""
        used = dict.fromkeys((*PARTS, "proxy", "controller"), 0)
        for pid, title in titles():
            for part in PARTS:
                if f"ray::ServeReplica:{self.name}:{part}" in title:
                    used[part] += resident(pid)
            if "ProxyActor" in title or "HAProxy" in title or title.startswith("haproxy"):
                used["proxy"] += resident(pid)
            if "ServeController" in title:
                used["controller"] += resident(pid)
        return used
