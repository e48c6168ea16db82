"""Reads how much processor time the processes of a server have used, by what they are."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = {
    ":Router": "router",
    ":Worker": "worker",
    "haproxy -": "proxy",
    "ProxyActor": "proxy",
}
"""What a command line contains, and what the process is; all others are ``rest``."""


def cpu_seconds(root: int) -> dict[str, float]:
    """Processor seconds so far of the descendants of process ``root`` by kind, and of this process as ``client``."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / ticks
    total: dict[str, float] = {"client": used.get(os.getpid(), 0.0)}
    for pid, seconds in used.items():
        if _descends(pid, root, parents):
            kind = _kind(pid)
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def _kind(pid: int) -> str:
    try:
        command = (
            (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return "rest"
    return next((kind for mark, kind in KINDS.items() if mark in command), "rest")
