"""Measures what the advisor needs of this machine: link, GPU memory, host memory, and how much can be pinned."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.experts import copy_blocks
from memory.device.host_region import HostRegion, pin, unpin

COPY_BYTES = 256 * 2**20
REPEATS = 5
BLOCK_BYTES = 4 * 2**20
"""Of the blocks that are gathered: about an expert of Qwen3-30B-A3B in FP8."""
PIN_TRIAL_BYTES = 4 * 2**30
"""So much is pinned on trial, and no more than a quarter of what the machine reports."""


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """Rates in bytes per second, memory rates count bytes read and bytes written; 0 without a GPU.

    ``link_bytes_per_s`` is one large copy's. ``gather``: (bytes, seconds), how long GPU programs take that read
    scattered blocks in place, as they read missing experts. ``lines`` says the same in words, with its conditions.
    """

    gpu_bytes: int
    link_bytes_per_s: float
    memory_bytes_per_s: float
    host_memory_bytes_per_s: float
    pinnable_bytes: int
    lines: tuple[str, ...]
    gather: tuple[tuple[int, float], ...] = ()


def measure_machine() -> MeasuredMachine:
    """Probes this machine; takes some seconds, half a gigabyte of host (and GPU) memory, and with a GPU for a moment
    the pinned memory of the trial."""
    pinnable, reason = pinnable_bytes()
    host_rate = host_copy_rate()
    lines = [
        f"Host memory: {host_rate / 1e9:.1f} GB/s read and written (copy of 256 MiB, {torch.get_num_threads()} "
        f"threads, best of {REPEATS}).",
    ]
    lock_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = lock_limit != resource.RLIM_INFINITY and lock_limit < pinnable
    if not torch.cuda.is_available():
        lines.append(f"Pinnable: {pinnable / 1e9:.1f} GB at most ({reason}).")
        if limited:
            lines.append(f"ulimit -l is {lock_limit / 1e6:.1f} MB; some drivers let no process pin more.")
        lines.append("No GPU that torch can use.")
        return MeasuredMachine(0, 0.0, 0.0, host_rate, pinnable, tuple(lines))
    free, total = torch.cuda.mem_get_info()
    pinnable, pin_line = _tried_to_pin(pinnable, reason, f"ulimit -l is {lock_limit / 1e6:.1f} MB" * limited)
    link, memory = gpu_copy_rates()
    gather = gather_curve()
    lines += [
        pin_line,
        f"GPU: {torch.cuda.get_device_name()}, {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free.",
        f"GPU memory: {memory / 1e9:.0f} GB/s read and written (copy of 256 MiB, best of {REPEATS}).",
        f"Link: {link / 1e9:.1f} GB/s from pinned host memory (one copy of 256 MiB, best of {REPEATS})."
        if link
        else "Link: not measured, 256 MiB could not be pinned.",
        f"Gather: {_gather_words(gather)}, by GPU programs that read them in mapped host memory (best of {REPEATS}).",
    ]
    return MeasuredMachine(total, link, memory, host_rate, pinnable, tuple(lines), gather)


def _gather_words(gather: Sequence[tuple[int, float]]) -> str:
    if not gather:
        return "not measured, the memory for it could not be pinned"
    rates = [
        f"{size / seconds / 1e9:.1f} GB/s {size // BLOCK_BYTES} block{'s' * (size > BLOCK_BYTES)} of 4 MiB"
        for size, seconds in gather
    ]
    return ", ".join(rates)


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


@contextmanager
def _pinned(num_bytes: int) -> Iterator[torch.Tensor | None]:
    """[num_bytes] uint8 of pinned host memory for a while, None where it is refused. Not torch's pinned allocator: that
    would keep the memory."""
    region = HostRegion(num_bytes)
    if pin(region.data) is not None:
        yield None
        return
    try:
        yield region.data
    finally:
        unpin(region.data)


def gpu_copy_rates() -> tuple[float, float]:
    """(link, GPU memory): pinned host to GPU, 0 where 256 MiB cannot be pinned; and a copy on the GPU counted read and
    written."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def on_device() -> None:
        for _ in range(8):  # so that launching does not count
            target.copy_(source)
        torch.cuda.synchronize()

    with _pinned(COPY_BYTES) as host:

        def from_host() -> None:
            assert host is not None
            target.copy_(host, non_blocking=True)
            torch.cuda.synchronize()

        link = _best_rate(COPY_BYTES, from_host) if host is not None else 0.0
    return link, _best_rate(8 * 2 * COPY_BYTES, on_device)


def gather_curve() -> tuple[tuple[int, float], ...]:
    """(bytes, seconds) to bring 1, 2, 4 ... 64 blocks of 4 MiB from mapped host memory, each number in one launch;
    empty where the memory for it cannot be pinned."""
    with _pinned(COPY_BYTES) as host:
        if host is None:
            return ()
        addresses = host.data_ptr() + torch.arange(COPY_BYTES // BLOCK_BYTES, device="cuda") * BLOCK_BYTES
        counts = [2**power for power in range(len(addresses).bit_length())]
        return tuple(
            (count * BLOCK_BYTES, count * BLOCK_BYTES / gather_rate(addresses[:count], BLOCK_BYTES))
            for count in counts
        )


def gather_rate(addresses: torch.Tensor, num_bytes: int) -> float:
    """Bytes per second at which the device brings the blocks of ``num_bytes`` at ``addresses`` [n] int64 to its own
    memory, in one launch; takes that much of it. On a CPU: at which it copies them."""
    target = torch.empty(len(addresses) * num_bytes, dtype=torch.uint8, device=addresses.device)
    targets = target.data_ptr() + torch.arange(len(addresses), device=addresses.device) * num_bytes

    def bring() -> None:
        copy_blocks(addresses, targets, num_bytes)
        if addresses.is_cuda:
            torch.cuda.synchronize()

    return _best_rate(len(addresses) * num_bytes, bring)


def _tried_to_pin(pinnable: int, reason: str, lock_sentence: str) -> tuple[int, str]:
    """What can be pinned by a trial, and a line about it. A trial that succeeds leaves the reported limit standing."""
    trial = min(PIN_TRIAL_BYTES, pinnable // 4)
    pinned, seconds = pinned_on_trial(trial)
    tail = f"; {lock_sentence}" if lock_sentence else ""
    if pinned < trial:
        return pinned, (
            f"Pinnable: {pinned / 1e9:.2f} GB, found by trial; more was refused{tail} (reported: "
            f"{pinnable / 1e9:.1f} GB, {reason})."
        )
    return pinnable, (
        f"Pinnable: {pinnable / 1e9:.1f} GB at most ({reason}{tail}); {pinned / 1e9:.2f} GB were pinned on trial in "
        f"{seconds:.2f} s."
    )


def pinned_on_trial(num_bytes: int, pinned: Callable[[int], bool] | None = None) -> tuple[int, float]:
    """(bytes, seconds): pins ``num_bytes``, and where that is refused finds the most that is not, to an eighth of it.
    ``pinned`` tries a size (default: on the GPU's driver)."""
    tries = pinned or _pins
    started = time.perf_counter()
    if tries(num_bytes):
        return num_bytes, time.perf_counter() - started
    good, bad = 0, num_bytes
    while bad - good > max(bad // 8, 2**20):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if tries(middle) else (good, middle)
    return good, time.perf_counter() - started


def _pins(num_bytes: int) -> bool:
    with _pinned(num_bytes) as host:
        return host is not None


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
