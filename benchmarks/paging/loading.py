"""Measures a start with paged experts: peak host memory against the experts' bytes, seconds to load and to pin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CLEAR_PEAK = "5"
"""What /proc/self/clear_refs takes to forget the peak of resident memory."""


@dataclass
class HostMemory:
    """Bytes of host memory that this process held: before, and at most since."""

    before_bytes: int = 0
    peak_bytes: int = 0

    @property
    def grown_bytes(self) -> int:
        """What the peak added."""
        return self.peak_bytes - self.before_bytes


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


@contextmanager
def watched_memory() -> Iterator[HostMemory]:
    """Host memory within, whole when it ends. Where the peak cannot be forgotten it is the process's so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    found = HostMemory(before_bytes=_status_bytes("VmRSS"))
    yield found
    found.peak_bytes = _status_bytes("VmHWM")
