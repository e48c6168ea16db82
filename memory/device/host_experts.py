"""The host store: every expert of every layer as one contiguous block in the layout that the expert kernel reads."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.hashing import hash_blocks
from memory.api import PAGE_ALIGN_BYTES, align_bytes
from memory.device.host_region import HostRegion, pin, populate, unpin

HASHED_BLOCKS = 16
"""Blocks of a layer that are hashed at once: their words are held twice meanwhile."""


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The experts of one layer: how many, and the bytes of each one's block (a multiple of 128)."""

    num_experts: int
    block_bytes: int


class HostExperts:
    """Blocks by (layer, expert), 128-byte aligned, in one region of exactly their size.

    Attributes:
        layers: the model layers that have experts, ascending; tables have one row per entry.
        block_bytes: per row.
        num_experts: of the layer that has most; tables have so many columns.
        hashes: [rows, num_experts] int64, each block's hash at load.
        pinning_s: seconds that :meth:`pin` took.
    """

    def __init__(self, blocks: Mapping[int, LayerBlocks], shared_name: str | None = None) -> None:
        """Takes the memory; with ``shared_name`` the region of that name, which may be filled already."""
        if not blocks:
            raise ValueError("a host store needs at least one layer with experts")
        self.pinning_s = 0.0
        self.layers = tuple(sorted(blocks))
        self._blocks = [blocks[layer] for layer in self.layers]
        self.block_bytes = tuple(entry.block_bytes for entry in self._blocks)
        self.num_experts = max(entry.num_experts for entry in self._blocks)
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._first = []
        num_bytes = 0
        for entry in self._blocks:
            if entry.block_bytes % PAGE_ALIGN_BYTES:
                raise ValueError(f"blocks of {entry.block_bytes} bytes are not whole 128-byte lines")
            self._first.append(num_bytes)
            num_bytes += entry.num_experts * entry.block_bytes
        self.num_bytes = num_bytes
        hash_bytes = align_bytes(8 * len(self.layers) * self.num_experts)
        self._region = HostRegion(num_bytes + hash_bytes, shared_name)
        kept = self._region.data[num_bytes : num_bytes + 8 * len(self.layers) * self.num_experts]
        self.hashes = kept.view(torch.int64).view(len(self.layers), self.num_experts)

    @property
    def is_filled(self) -> bool:
        """Whether another worker has filled the region: nothing needs to be read from the checkpoint."""
        return self._region.is_filled

    @property
    def place_bytes(self) -> int:
        """Bytes of a place that can hold any of the blocks."""
        return max(self.block_bytes)

    def row(self, layer: int) -> int:
        """The row of a model layer in the tables; KeyError for a layer without experts."""
        return self._row[layer]

    def block(self, layer: int, expert: int) -> torch.Tensor:
        """[block_bytes] uint8 of one expert, to be filled or read."""
        row = self._row[layer]
        size = self.block_bytes[row]
        first = self._first[row] + expert * size
        return self._region.data[first : first + size]

    def layer_blocks(self, layer: int) -> torch.Tensor:
        """[experts, block_bytes] uint8 of a layer, one block behind the other."""
        row = self._row[layer]
        size, count = self.block_bytes[row], self._blocks[row].num_experts
        return self._region.data[self._first[row] : self._first[row] + count * size].view(count, size)

    def fill(self, layer: int, blocks: torch.Tensor) -> None:
        """Takes a layer's blocks, [experts, block_bytes] uint8 on any device, and enters their hashes."""
        self.layer_blocks(layer).copy_(blocks)
        self._enter_hashes(layer, blocks, blocks.device)

    def seal_layer(self, layer: int, device: torch.device) -> None:
        """Enters the hashes of a layer's blocks, which were filled; ``device`` computes them: a GPU reads pinned blocks
        faster than a processor adds them up."""
        self._enter_hashes(layer, self.layer_blocks(layer), device)

    def _enter_hashes(self, layer: int, blocks: torch.Tensor, device: torch.device) -> None:
        at_once = HASHED_BLOCKS if device.type == "cuda" else 1
        for start in range(0, len(blocks), at_once):
            part = slice(start, min(start + at_once, len(blocks)))
            found = hash_blocks(blocks[part].to(device))
            self.hashes[self._row[layer], part] = found.to(self.hashes.device)

    def seal(self, layer: int, expert: int) -> None:
        """Enters the hash of a block that was filled."""
        self.hashes[self._row[layer], expert] = hash_blocks(self.block(layer, expert))

    def complete(self) -> None:
        """All blocks are filled and sealed."""
        self._region.complete()

    def pin(self) -> str | None:
        """Makes the blocks readable by the GPU in place for this store's life; None, or why it cannot be. Before they
        are filled: what is copied there is then copied at the link's rate."""
        started_s = time.perf_counter()
        populate(self._region.data)
        reason = pin(self._region.data)
        self.pinning_s = time.perf_counter() - started_s
        if reason is None:
            # Before the mapping goes: its addresses could not be pinned again, and the next store may get them.
            weakref.finalize(self, unpin, self._region.data)
        return reason

    def addresses(self) -> torch.Tensor:
        """[rows, num_experts] int64, the address of each block; 0 where a layer has fewer experts. With unified
        addressing a registered block has one address for host and GPU."""
        found = torch.zeros(len(self.layers), self.num_experts, dtype=torch.int64)
        base = self._region.data.data_ptr()
        for row, entry in enumerate(self._blocks):
            steps = torch.arange(entry.num_experts) * entry.block_bytes
            found[row, : entry.num_experts] = base + self._first[row] + steps
        return found

    def close(self) -> None:
        """Lets a shared region's file go."""
        self._region.close()
