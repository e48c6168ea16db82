"""Says where a decode step's time goes: attention, experts, linear attention, rest, and what the GPU waits for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

PARTS = {
    "attention": r"attention|decode_split|combine_splits|flash|fmha|write_kv|norm_rotate|_prefill",
    "linear_attention": r"delta|conv_step|conv_rows|gated_norm|chunk_|l2_norm|recurrent|solve_tril|cumsum",
    "experts": r"expert|_gate_up|_down|_combine|route|group_pairs|_pairs|radix|sort|searchsorted|topk",
}
LAUNCH_GAP_US = 10.0
"""Shorter gaps lie between the kernels of one step; longer ones are waits for the host."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's run on the GPU, microseconds."""

    name: str
    start_us: float
    end_us: float


def record_kernels(run: Callable[[], object]) -> list[Kernel]:
    """Everything that ran on the GPU during ``run``, by start."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel.start_us)


def part_of(name: str) -> str:
    """The part of a step that a kernel belongs to."""
    for part, pattern in PARTS.items():
        if re.search(pattern, name):
            return part
    return "rest"


def breakdown(kernels: list[Kernel], window_s: float, num_steps: int) -> Mapping[str, float]:
    """Milliseconds a step over the last ``window_s`` of a recording that holds ``num_steps`` steps: kernels by part,
    ``launch_gaps`` between them, ``host_gaps``; and ``kernels`` a step."""
    if not kernels:
        return {}
    end = max(kernel.end_us for kernel in kernels)
    inside = [kernel for kernel in kernels if kernel.start_us >= end - 1e6 * window_s]
    found = dict.fromkeys([*PARTS, "rest", "launch_gaps", "host_gaps"], 0.0)
    busy_until = inside[0].start_us
    for kernel in inside:
        gap = kernel.start_us - busy_until
        if gap > 0:
            found["host_gaps" if gap > LAUNCH_GAP_US else "launch_gaps"] += gap
        found[part_of(kernel.name)] += max(0.0, kernel.end_us - max(kernel.start_us, busy_until))
        busy_until = max(busy_until, kernel.end_us)
    per_step = {name: value / 1e3 / num_steps for name, value in found.items()}
    return {**per_step, "kernels": len(inside) / num_steps}


def heaviest(kernels: list[Kernel], count: int = 15) -> list[str]:
    """Lines of the kernels that took the most time together."""
    totals: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        time_us, number = totals.get(kernel.name, (0.0, 0))
        totals[kernel.name] = (time_us + kernel.end_us - kernel.start_us, number + 1)
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])[:count]
    return [f"{time_us / 1e3:9.3f} ms {number:6d} x {name[:100]}" for name, (time_us, number) in ranked]
