"""Measures what the advisor needs of this machine: link, GPU memory, host memory, and how much can be pinned."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

COPY_BYTES = 256 * 2**20
REPEATS = 5


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """Rates in bytes per second, memory rates count bytes read and bytes written; 0 without a GPU.

    ``lines`` says the same in words, each with its conditions.
    """

    gpu_bytes: int
    link_bytes_per_s: float
    memory_bytes_per_s: float
    host_memory_bytes_per_s: float
    pinnable_bytes: int
    lines: tuple[str, ...]


def measure_machine() -> MeasuredMachine:
    """Probes this machine; takes some seconds and half a gigabyte of host (and GPU) memory."""
    pinnable, reason = pinnable_bytes()
    host_rate = host_copy_rate()
    lines = [
        f"Host memory: {host_rate / 1e9:.1f} GB/s read and written (copy of 256 MiB, {torch.get_num_threads()} "
        f"threads, best of {REPEATS}).",
        f"Pinnable: {pinnable / 1e9:.1f} GB at most ({reason}).",
    ]
    lock_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = lock_limit != resource.RLIM_INFINITY and lock_limit < pinnable
    if not torch.cuda.is_available():
        if limited:
            lines.append(f"ulimit -l is {lock_limit / 1e6:.1f} MB; some drivers let no process pin more.")
        lines.append("No GPU that torch can use.")
        return MeasuredMachine(0, 0.0, 0.0, host_rate, pinnable, tuple(lines))
    free, total = torch.cuda.mem_get_info()
    link, memory = gpu_copy_rates()
    if limited and lock_limit < COPY_BYTES:
        lines.append(f"256 MiB could be pinned although ulimit -l is {lock_limit / 1e6:.1f} MB.")
    lines += [
        f"GPU: {torch.cuda.get_device_name()}, {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free.",
        f"GPU memory: {memory / 1e9:.0f} GB/s read and written (copy of 256 MiB, best of {REPEATS}).",
        f"Link: {link / 1e9:.1f} GB/s from pinned host memory (one copy of 256 MiB, best of {REPEATS}).",
    ]
    return MeasuredMachine(total, link, memory, host_rate, pinnable, tuple(lines))


def _best_rate(num_bytes: int, work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return num_bytes / min(times)


def host_copy_rate() -> float:
    """Bytes read and written per second by a large copy in host memory."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    return _best_rate(2 * COPY_BYTES, copy)


def gpu_copy_rates() -> tuple[float, float]:
    """(link, GPU memory): pinned host to GPU, and a copy on the GPU counted read and written."""
    host = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def from_host() -> None:
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    def on_device() -> None:
        for _ in range(8):  # so that launching does not count
            target.copy_(source)
        torch.cuda.synchronize()

    return _best_rate(COPY_BYTES, from_host), _best_rate(8 * 2 * COPY_BYTES, on_device)


def pinnable_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """How much host memory may be pinned, and what sets the limit: memory that is available, the control group, half
    of the memory under WSL2 (more fails there). ``ulimit -l`` is not among them: drivers differ in heeding it."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    sizes = {name: int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")}
    limits = {"available memory": sizes["MemAvailable"]}
    group = cgroup / "memory.max"
    if group.is_file() and (text := group.read_text().strip()).isdigit():
        limits["the control group's memory.max"] = int(text)
    version = proc / "version"
    if version.is_file() and "microsoft" in version.read_text().lower():
        limits["half of the memory, under WSL2"] = sizes["MemTotal"] // 2
    reason = min(limits, key=lambda name: limits[name])
    return limits[reason], f"limited by {reason}"
