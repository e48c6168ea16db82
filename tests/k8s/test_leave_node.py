"""The hook that empties a pod: whom it waits for, how long, and that it never stands in a pod's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.k8s.loading import script

leaving = script("leave_node")

RAYLET = (
    "/site-packages/ray/core/src/ray/raylet/raylet",
    "--node_id=ab12",
    "--python_worker_command=python worker.py --gcs-address=10.0.0.9:1 --node_id=wrong",
    "--gcs-address=10.0.0.1:6379",
)


class Pod:
    """A process table as /proc shows it, and a clock; ``ends`` says when processes do."""

    def __init__(self, proc: Path, ends: dict[str, float], with_raylet: bool = True) -> None:
        self.proc, self.now, self.ends = proc, 0.0, ends
        self.drained: list[tuple[str, str, float]] = []
        (proc / "self").mkdir()
        (proc / "1").mkdir()  # without a command line: it has just ended
        processes = [("ray::IDLE",), ("bash", "-c", "ray start"), *((name,) for name in ends)]
        for number, command in enumerate([*processes, *([RAYLET] if with_raylet else [])], start=10):
            (proc / str(number)).mkdir()
            (proc / str(number) / "cmdline").write_bytes(
                b"\0".join(part.encode() for part in command) + b"\0"
            )

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for entry in self.proc.glob("*/cmdline"):
            if self.ends.get(entry.read_bytes().rstrip(b"\0").decode(), 1e9) <= self.now:
                entry.unlink()

    def leave(self, seconds: float) -> bool:
        def ask(node: Any, seconds: float) -> None:
            self.drained.append((node.node_id, node.gcs_address, seconds))

        done: bool = leaving.leave(seconds, self.proc, ask, self.sleep, lambda: self.now)
        return done


def test_it_drains_its_own_node_and_waits_for_replicas_and_proxies(tmp_path: Path) -> None:
    pod = Pod(tmp_path, {"ray::ServeReplica:headroom:Worker.generate": 40.0, "ray::ProxyActor": 70.0})
    assert pod.leave(720.0)
    assert pod.drained == [("ab12", "10.0.0.1:6379", 720.0)]
    assert 70.0 <= pod.now <= 72.0


def test_it_waits_for_haproxy_too(tmp_path: Path) -> None:
    pod = Pod(tmp_path, {"ray::HAProxyManager.update": 30.0})
    assert pod.leave(720.0)
    assert pod.now >= 30.0


def test_it_looks_only_once_serve_has_heard(tmp_path: Path) -> None:
    pod = Pod(tmp_path, {})
    assert pod.leave(720.0)
    assert pod.now >= leaving.NOTICE_S


def test_it_gives_up_when_its_time_is_over(tmp_path: Path) -> None:
    pod = Pod(tmp_path, {"ray::ServeReplica:headroom:Router": 1e6})
    assert not pod.leave(90.0)
    assert 90.0 <= pod.now <= 92.0


def test_a_pod_without_a_raylet_ends_at_once(tmp_path: Path) -> None:
    pod = Pod(tmp_path, {"ray::ServeReplica:headroom:Router": 1e6}, with_raylet=False)
    assert pod.leave(90.0)
    assert (pod.now, pod.drained) == (0.0, [])


def test_what_goes_wrong_is_said_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(seconds: float) -> bool:
        raise RuntimeError("no such node")

    monkeypatch.setattr(leaving, "leave", refuse)
    assert leaving.main(["720"]) == 0
    assert "the node was not drained: no such node" in capsys.readouterr().err
    assert leaving.main([]) == 0


def test_ray_has_the_call_that_drains() -> None:
    """Private to Ray: a version without it must not pass unseen."""
    from ray._raylet import InnerGcsClient  # what a GcsClient hands its calls to
    from ray.core.generated import autoscaler_pb2

    assert callable(InnerGcsClient.drain_node)
    assert autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION


def test_ray_still_names_its_processes_so() -> None:
    from ray.serve._private import haproxy
    from ray.serve._private.proxy import ProxyActor

    names = {actor.__ray_metadata__.class_name for actor in (ProxyActor, haproxy.HAProxyManager)}
    assert {f"ray::{name}" for name in names} == set(leaving.SERVING[1:])
