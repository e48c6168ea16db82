"""Measures how long this machine takes to bring n experts from pinned host memory: the best of its two ways."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu_engine import median_s
from benchmarks.limits import LinkCurve
from kernels.experts import copy_blocks
from memory.device.host_experts import HostExperts

POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
IN_A_ROW = 6
"""Repeats between two looks at the clock: launching does not count."""


def link_curve(host: HostExperts, device: torch.device) -> LinkCurve:
    """Seconds to bring n experts of one layer to the device's memory, by GPU programs in one launch or by the copy
    engine, whichever is faster; on a CPU by copying."""
    size, blocks = host.block_bytes[0], host.layer_blocks(host.layers[0])
    addresses = host.addresses()[0].to(device)
    points = []
    for count in POINTS:
        if count <= len(blocks):
            points.append((float(count), _bring_s(blocks, addresses, count, size, device)))
    return LinkCurve(tuple(points))


def _bring_s(
    blocks: torch.Tensor, addresses: torch.Tensor, count: int, size: int, device: torch.device
) -> float:
    target = torch.empty(count, size, dtype=torch.uint8, device=device)
    targets = target.data_ptr() + torch.arange(count, device=device) * size

    def gather() -> None:
        for _ in range(IN_A_ROW):
            copy_blocks(addresses[:count], targets, size)

    def copy() -> None:
        for _ in range(IN_A_ROW):
            target.copy_(blocks[:count], non_blocking=True)

    if device.type != "cuda":
        started_s = time.perf_counter()
        gather()
        return (time.perf_counter() - started_s) / IN_A_ROW
    return min(median_s(gather, 5), median_s(copy, 5)) / IN_A_ROW
