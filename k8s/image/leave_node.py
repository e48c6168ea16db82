"""Empties a pod before it ends: has Ray drain this pod's node, then waits for the streams that still run here.

A worker pod's preStop hook: ``python leave_node.py SECONDS``. Serve answers a draining node by starting each of its
replicas on another one and by ending those here once their requests are done, or when ``graceful_shutdown_timeout_s``
is all that is left of SECONDS; the proxy goes when its last stream has ended. Without the hook, the node would be
gone a moment after SIGTERM, and its streams with it. It never fails a pod's end: what goes wrong is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_S = 1.0
NOTICE_S = 5.0
"""Serve needs about a second to hear of a drain; an earlier look could find nobody yet on a node that fills up."""
SERVING = ("ray::ServeReplica:", "ray::ProxyActor", "ray::HAProxyManager")
"""How Ray names the processes that carry requests."""


@dataclass(frozen=True)
class Node:
    """A Ray node as its raylet was started."""

    node_id: str
    gcs_address: str


def commands(proc: Path = PROC) -> Iterator[list[str]]:
    """The command line of every process in this container."""
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has just ended
            yield [part.decode(errors="replace") for part in line.split(b"\0") if part]


def find_node(proc: Path = PROC) -> Node | None:
    """This pod's node, as its raylet's own command line tells; None where no raylet runs any more."""
    for command in commands(proc):
        if command and command[0].endswith("/raylet"):
            flags = dict(part.removeprefix("--").split("=", 1) for part in command[1:] if "=" in part)
            if flags.get("node_id") and flags.get("gcs-address"):
                return Node(flags["node_id"], flags["gcs-address"])
    return None


def num_serving(proc: Path = PROC) -> int:
    """Replicas and proxies in this pod."""
    return sum(bool(command) and command[0].startswith(SERVING) for command in commands(proc))


def drain(node: Node, seconds: float) -> None:
    """Asks Ray to move everything off the node within ``seconds``. RuntimeError when it refuses."""
    # Private to Ray: `ray drain-node` is a hidden command around the same call.
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    deadline_ms = int((time.time() + seconds) * 1000)
    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION  # the only one that is never refused
    accepted, why = GcsClient(address=node.gcs_address).drain_node(
        node.node_id, reason, "its pod ends", deadline_ms
    )
    if not accepted:
        raise RuntimeError(why)


def leave(
    seconds: float,
    proc: Path = PROC,
    ask: Callable[[Node, float], None] = drain,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Drains, and waits until nobody serves here or ``seconds`` are over; whether nobody does."""
    start_s = clock()
    node = find_node(proc)
    if node is None:
        return True
    ask(node, seconds)
    sleep(NOTICE_S)
    while num_serving(proc):
        if clock() - start_s >= seconds:
            return False
        sleep(POLL_S)
    return True


def main(arguments: list[str]) -> int:
    """Always 0: a hook that fails ends the pod at once."""
    try:
        empty = leave(float(arguments[0]))
    except Exception as error:
        print(f"leave_node: the node was not drained: {error}", file=sys.stderr)
        return 0
    if not empty:
        print(f"leave_node: {num_serving()} processes still serve here", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
