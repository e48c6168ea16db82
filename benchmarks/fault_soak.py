"""Serves under a steady load while one fault after another befalls the service; nothing may be lost or left behind.

    python -m benchmarks.fault_soak [--minutes 10] [--every 10] [--transports default haproxy] [--engine native]
                                    [--json FILE]

The time is shared by the transports, each in a process and a cluster of its own. Figures, in sum: ``lost`` requests
(neither complete nor, in so many words, refused or failed, or marred where no fault may mar them),
``broken_promises`` of single faults, ``leaked_pages`` and ``leaked_requests`` once all is quiet and the prefix caches
are empty, ``memory_growth_mb`` of the service but its workers (theirs is ``worker_growth_mb``) from the first third
to the last, and ``error_event_ms_max`` after a worker's death. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.drills.cluster import TRANSPORTS, running_cluster
from benchmarks.report import hardware
from demo.packing import restore

REPLICAS = 2
ROUTERS = 2
CLIENTS = 10
LONGEST = 60
"""Most tokens of an ordinary answer."""
WHOLE_S = 120.0
"""The service is whole again within so long of a fault, or something is wrong."""
ARENA_BYTES = 48 << 20
GROWTH_MB = 55.0
"""What the service may grow by between the first and the last third, but for its workers: Routers that were replaced
at other times come to the same sum in steps of 50."""
LONG_RUN = 30
WARM_UP_MB = 150.0
"""The same for a run of fewer faults than that: Routers and proxy still come to the size that the load asks for."""
WORKER_GROWTH_MB = 40.0 + REPLICAS * ARENA_BYTES / 1e6
"""The same for them: a fresh one has not touched its arena, and they are replaced all the time."""
MAR_S = 10.0
"""A fault may mar requests for so long."""
DEMO = Path(__file__).resolve().parents[1] / "demo" / "model"


@dataclass
class Outcome:
    """What one run saw."""

    faults: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    leaked_bytes: int = 0
    leaked_pages: int = 0
    leaked_requests: int = 0
    open_bookings: int = 0
    tell_s: list[float] = field(default_factory=list)
    slow_bytes: list[int] = field(default_factory=list)
    memory_mb: list[dict[str, float]] = field(default_factory=list)
    """By part, each time the service is whole, ahead of the next fault."""
    seconds: float = 0.0

    @property
    def memory_growth_mb(self) -> float:
        """Of all but the workers, from the median of the first third to that of the last."""
        return _growth([sum(parts.values()) - parts["Worker"] for parts in self.memory_mb])

    @property
    def worker_growth_mb(self) -> float:
        """The same of the workers, which also touch more and more of their arenas."""
        return _growth([parts["Worker"] for parts in self.memory_mb])

    def problems(self) -> list[str]:
        """What must not be."""
        found = [*self.broken, *self.lost]
        found += [f"{self.leaked_bytes} bytes leaked"] if self.leaked_bytes else []
        found += [f"{self.leaked_requests} requests run for nobody"] if self.leaked_requests else []
        found += [f"{self.open_bookings} bookings are left"] if self.open_bookings else []
        if self.memory_growth_mb > (GROWTH_MB if len(self.memory_mb) >= LONG_RUN else WARM_UP_MB):
            found.append(f"memory grew by {self.memory_growth_mb:.0f} MB")
        if self.worker_growth_mb > WORKER_GROWTH_MB:
            found.append(f"the workers' memory grew by {self.worker_growth_mb:.0f} MB")
        return found


def _growth(values: Sequence[float]) -> float:
    third = len(values) // 3
    return median(values[-third:]) - median(values[:third]) if third else 0.0


def options_of(engine: str, scratch: Path) -> dict[str, Any]:
    """The service's options: the demo model, or the fake engine at a pace."""
    common = {
        "engine": engine,
        "replicas": REPLICAS,
        "router_replicas": ROUTERS,
        "max_running": 12,
        "max_queue": 32,
        "worker_backlog": 8,
        "served_name": "soaked",
        "graceful_shutdown_timeout_s": 120.0,
        "health_check_period_s": 1.0,
        "log_level": "warning",
    }
    if engine == "native":
        return {
            **common,
            "model": str(restore(DEMO)),
            "device": "cpu",
            "num_threads": 1,
            "arena_bytes": ARENA_BYTES,
        }
    # A page of one token and a prompt that takes its time; the pace lets a stream live long enough to be hit.
    script = {
        "output": "script",
        "token_ids": list(b"soak"),
        "tokens_per_s": 60.0,
        "prefill_tokens_per_s": 1500.0,
        "bytes_per_token": 1,
        "arena_bytes": 1 << 20,
    }
    folder = fake_folder(scratch, script)
    return {**common, "model": str(folder)}


def fake_folder(scratch: Path, script: dict[str, Any]) -> Path:
    """A model folder of the fake engine."""
    import shutil

    from serve_app.text.model_folder import FAKE_MODEL

    folder = scratch / "soaked"
    shutil.copytree(FAKE_MODEL, folder)
    (folder / "fake.json").write_text(json.dumps(script))
    return folder


async def soak(
    service: Any, seconds: float, every_s: float, names: Sequence[str] = (), seed: int = 0
) -> Outcome:
    """Runs the load and the faults (``names``, or all) against a deployed service, in rounds of random order; the first
    round is always whole."""
    from benchmarks.drills.clients import Crowd, new_client
    from benchmarks.drills.faults import FAULTS, Broken, Drill

    outcome = Outcome()
    crowd = Crowd(service.url, CLIENTS, seed, LONGEST)
    drill = Drill(service, new_client(service.url), CLIENTS, REPLICAS, ROUTERS)
    order = random.Random(seed)
    spans: list[tuple[float, float, str]] = []
    began_s = time.monotonic()
    queue: list[str] = []
    while time.monotonic() - began_s < seconds or len(outcome.faults) < len(names or FAULTS):
        used = await asyncio.to_thread(service.memory_bytes)
        outcome.memory_mb.append({part: round(num_bytes / 1e6, 1) for part, num_bytes in used.items()})
        queue = queue or order.sample(sorted(names or FAULTS), len(names or FAULTS))
        name = queue.pop()
        fault_s = time.monotonic()
        try:
            await FAULTS[name](drill)
        except Broken as broken:
            outcome.broken.append(f"{name}: {broken}")
        spans.append((fault_s, time.monotonic(), name))
        outcome.faults[name] = outcome.faults.get(name, 0) + 1
        took_s = await asyncio.to_thread(service.wait_until_whole, REPLICAS, ROUTERS, WHOLE_S)
        print(
            f"{fault_s - began_s:6.1f} s  {name}: {spans[-1][1] - fault_s:.1f} s, whole after {took_s:.1f} s",
            flush=True,
        )
        await asyncio.sleep(max(0.0, fault_s + every_s - time.monotonic()))
    await crowd.stop()
    await drill.http.aclose()
    outcome.seconds = time.monotonic() - began_s
    outcome.outcomes = dict(crowd.tally.outcomes)
    outcome.lost = [*crowd.tally.lost, *unexplained(crowd.tally.marred, spans, began_s)]
    outcome.tell_s, outcome.slow_bytes = drill.tell_s, drill.slow_bytes
    await asyncio.to_thread(_count_what_is_left, service, outcome)
    return outcome


def unexplained(
    marred: list[tuple[float, str, str]], spans: list[tuple[float, float, str]], began_s: float
) -> list[str]:
    """Requests that were failed or cut where no fault may do that."""
    from benchmarks.drills.faults import MARS

    return [
        f"{at_s - began_s:.1f} s: {how}: {what}"
        for at_s, how, what in marred
        if not any(
            how in MARS.get(name, ()) and first_s <= at_s <= last_s + MAR_S for first_s, last_s, name in spans
        )
    ]


def _count_what_is_left(service: Any, outcome: Outcome) -> None:
    outcome.leaked_requests = service.settled()
    outcome.open_bookings = service.open_bookings()
    outcome.leaked_bytes, outcome.leaked_pages = service.leaks()


def run_here(transport: str, options: argparse.Namespace, seconds: float) -> Outcome:
    """One transport, in this process."""
    with tempfile.TemporaryDirectory() as scratch, running_cluster(transport) as address:
        from benchmarks.drills.service import Service

        service = Service("soak", address, options_of(options.engine, Path(scratch)))
        service.deploy()
        service.wait_until_whole(REPLICAS, ROUTERS, WHOLE_S)
        outcome = asyncio.run(soak(service, seconds, options.every, options.faults))
        service.delete()
        return outcome


def run_apart(transport: str, options: argparse.Namespace, seconds: float) -> Outcome:
    """The same in a process of its own: Serve reads its transport once."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "outcome.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.fault_soak",
            "--one",
            transport,
            "--engine",
            options.engine,
        ]
        command += ["--minutes", str(seconds / 60), "--every", str(options.every), "--json", str(file)]
        command += ["--faults", *options.faults] if options.faults else []
        subprocess.run(command, check=True, env={**os.environ, **TRANSPORTS[transport]})
        return Outcome(**json.loads(file.read_text()))


def figures_of(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The figures of all transports in sum, and each one's own."""
    every = list(outcomes.values())
    tell_ms = [1e3 * s for outcome in every for s in outcome.tell_s]
    figures: dict[str, Any] = {
        "lost": sum(len(outcome.lost) for outcome in every),
        "broken_promises": sum(len(outcome.broken) for outcome in every),
        "leaked_pages": sum(outcome.leaked_pages for outcome in every),
        "leaked_requests": sum(outcome.leaked_requests for outcome in every),
        "memory_growth_mb": max(outcome.memory_growth_mb for outcome in every),
        "worker_growth_mb": max(outcome.worker_growth_mb for outcome in every),
        "error_event_ms_max": max(tell_ms, default=float("nan")),
        "slow_reader_bytes_max": max((b for o in every for b in o.slow_bytes), default=0),
    }
    for transport, outcome in outcomes.items():
        figures[f"{transport}.seconds"] = outcome.seconds
        figures[f"{transport}.memory_growth_mb"] = outcome.memory_growth_mb
        figures |= {f"{transport}.faults.{name}": count for name, count in sorted(outcome.faults.items())}
        figures |= {f"{transport}.requests.{name}": n for name, n in sorted(outcome.outcomes.items())}
    return figures


def main() -> int:
    """Prints figures and problems; 1 if there are any of the latter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one fault to the next")
    parser.add_argument("--transports", nargs="+", choices=sorted(TRANSPORTS), default=sorted(TRANSPORTS))
    parser.add_argument("--engine", choices=("native", "fake"), default="native")
    parser.add_argument(
        "--faults", nargs="+", default=[], help="these alone, as they are called in the report"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=sorted(TRANSPORTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = 60 * options.minutes
    if options.one:
        outcome = run_here(options.one, options, seconds)
        options.json.write_text(json.dumps(asdict(outcome)))
        return 0
    share_s = seconds / len(options.transports)
    load_before = os.getloadavg()
    outcomes = {name: run_apart(name, options, share_s) for name in options.transports}
    figures = figures_of(outcomes)
    problems = [f"{name}: {what}" for name, outcome in outcomes.items() for what in outcome.problems()]
    conditions = {
        "engine": options.engine,
        "hardware": hardware(),
        "replicas": REPLICAS,
        "routers": ROUTERS,
        "clients": CLIENTS,
        "seconds_between_faults": options.every,
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
    }
    memory = {name: outcome.memory_mb for name, outcome in outcomes.items()}
    report = {
        "benchmark": "fault_soak",
        "conditions": conditions,
        "figures": figures,
        "problems": problems,
        "memory_mb": memory,
    }
    print(json.dumps(report, indent=1, default=str))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
