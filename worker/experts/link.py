"""Measures at start how fast this device brings missing experts out of the host store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memory.device.host_experts import HostExperts
from worker.probe import gather_rate

SAMPLE_BYTES = 64 * 2**20
"""Blocks of one layer that are brought, at most."""


@dataclass(frozen=True, slots=True)
class ExpertLink:
    """``bytes_per_s`` at which ``num_blocks`` blocks of ``block_bytes`` came, all in one launch."""

    bytes_per_s: float
    num_blocks: int
    block_bytes: int

    def line(self) -> str:
        """The measurement in words."""
        return (
            f"missing ones come at {self.bytes_per_s / 1e9:.1f} GB/s here (measured: {self.num_blocks} of "
            f"{self.block_bytes} bytes at once)"
        )


def measure_link(host: HostExperts, device: torch.device) -> ExpertLink:
    """Reads blocks of the layer with the largest ones in place; the store is filled, and pinned for a GPU. Takes
    :data:`SAMPLE_BYTES` of the device for a moment."""
    row = max(range(len(host.layers)), key=lambda number: host.block_bytes[number])
    addresses = host.addresses()[row]
    size = host.block_bytes[row]
    sample = addresses[addresses != 0][: max(1, SAMPLE_BYTES // size)]
    return ExpertLink(gather_rate(sample.to(device), size), len(sample), size)
