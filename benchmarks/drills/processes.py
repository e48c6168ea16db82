"""Processes of one's own cluster by the titles that Ray gives them, and their memory."""

from __future__ import annotations

import os
from pathlib import Path


def titles() -> list[tuple[int, str]]:
    """Processes of this process's own cluster; others may run on the machine."""
    titles: dict[int, str] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                titles[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            parents[int(entry.name)] = int(stat[1])
    return [(pid, title) for pid, title in titles.items() if _descends(pid, parents)]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def resident(pid: int) -> int:
    """Bytes of memory of a process, shared pages counted by their share; 0 of one that has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
