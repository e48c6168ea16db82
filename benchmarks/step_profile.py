"""Says where a decode step's time goes: attention, experts, linear attention, rest, and what the GPU waits for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

PARTS = {
    "attention": r"attention|_attend|_add_splits|flash|fmha|write_kv|norm_rotate|_store_heads|_prefill|_qkv",
    "linear_attention": r"delta|_conv|gated_norm|chunk_|l2_norm|_prepare$|_advance$|recurrent|solve_tril|cumsum",
    "experts": r"expert|_gate_up|_down|_combine|_route|_group|_pairs|one_token",
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


def breakdown(kernels: list[Kernel], num_steps: float) -> Mapping[str, float]:
    """Milliseconds a step over a recording of ``num_steps`` steps: kernels by part, ``launch_gaps`` between them,
    ``host_gaps``; and ``kernels`` a step."""
    if not kernels:
        return {}
    found = dict.fromkeys([*PARTS, "rest", "launch_gaps", "host_gaps"], 0.0)
    busy_until = kernels[0].start_us
    for kernel in kernels:
        gap = kernel.start_us - busy_until
        if gap > 0:
            found["host_gaps" if gap > LAUNCH_GAP_US else "launch_gaps"] += gap
        found[part_of(kernel.name)] += max(0.0, kernel.end_us - max(kernel.start_us, busy_until))
        busy_until = max(busy_until, kernel.end_us)
    per_step = {name: value / 1e3 / num_steps for name, value in found.items()}
    return {**per_step, "kernels": len(kernels) / num_steps}


def heaviest(kernels: list[Kernel], count: int = 15) -> list[str]:
    """Lines of the kernels that took the most time together."""
    totals: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        time_us, number = totals.get(kernel.name, (0.0, 0))
        totals[kernel.name] = (time_us + kernel.end_us - kernel.start_us, number + 1)
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])[:count]
    return [f"{time_us / 1e3:9.3f} ms {number:6d} x {name[:100]}" for name, (time_us, number) in ranked]
