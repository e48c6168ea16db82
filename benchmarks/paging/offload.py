"""The old ways to run experts that do not fit, for comparison: all weights through buffers each pass, or whole layers.

Both stream layers whole, whatever a step chooses, and as well as that can be: one copy of a layer's contiguous pinned
blocks on a stream of its own, two buffers, the next layer on its way while one is computed, across steps too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.experts import run_experts
from memory.device.host_experts import HostExperts
from worker.experts.block_format import block_format
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer

BUFFERS = 2


@dataclass
class LayerStream:
    """Whole layers' blocks on the device: the first ``num_kept`` layers' for good, the others' in turn.

    Attributes:
        host: where they come from.
        on: whether experts are run from here.
    """

    host: HostExperts | None = None
    on: bool = False
    _kept: dict[int, torch.Tensor] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)
    _buffers: list[torch.Tensor] = field(default_factory=list)
    _ready: list[torch.cuda.Event] = field(default_factory=list)
    _done: list[torch.cuda.Event] = field(default_factory=list)
    _side: torch.cuda.Stream | None = None
    _turn: int = 0

    @property
    def pass_bytes(self) -> int:
        """Bytes that cross the link in each pass."""
        assert self.host is not None
        return sum(self.host.layer_blocks(layer).numel() for layer in self._order)

    def start(self, num_kept: int) -> None:
        """Experts are run from here from now on; nothing may be running."""
        assert self.host is not None
        layers = self.host.layers
        self._side = torch.cuda.Stream()
        self._kept = {layer: self.host.layer_blocks(layer).cuda() for layer in layers[:num_kept]}
        self._order = list(layers[num_kept:])
        largest = max((self.host.layer_blocks(layer) for layer in self._order), key=torch.Tensor.numel)
        self._buffers = [torch.empty_like(largest, device="cuda") for _ in range(BUFFERS)]
        self._ready = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._done = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._turn, self.on = 0, True
        for turn in range(BUFFERS):
            self._bring(turn)
        torch.cuda.synchronize()

    def stop(self) -> None:
        """Experts are paged again; the device's memory goes."""
        torch.cuda.synchronize()
        self.on = False
        self._kept.clear()
        self._buffers.clear()

    def _bring(self, turn: int) -> None:
        assert self.host is not None
        assert self._side is not None
        at, layer = turn % BUFFERS, self._order[turn % len(self._order)]
        blocks = self.host.layer_blocks(layer)
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._done[at])
            self._buffers[at][: len(blocks), : blocks.shape[1]].copy_(blocks, non_blocking=True)
            self._ready[at].record(self._side)

    def blocks(self, layer: int) -> torch.Tensor:
        """[experts, block_bytes] of a layer, on the device when the current stream is there; layers come in order."""
        kept = self._kept.get(layer)
        if kept is not None:
            return kept
        assert layer == self._order[self._turn % len(self._order)], "layers must come in their order"
        torch.cuda.current_stream().wait_event(self._ready[self._turn % BUFFERS])
        return self._buffers[self._turn % BUFFERS]

    def used(self, layer: int) -> None:
        """The layer is computed: the next one but one takes its buffer."""
        if layer in self._kept:
            return
        self._done[self._turn % BUFFERS].record()
        self._bring(self._turn + BUFFERS)
        self._turn += 1


class OffloadedExperts:
    """A layer's experts: paged, or of the stream while it is on."""

    def __init__(self, paged: RoutedExperts, experts: ExpertLayer, stream: LayerStream) -> None:
        self._paged, self._stream, self._layer = paged, stream, experts.layer
        self._where = block_format(experts.format.block_layout(experts.shape))
        self._inner, self._activation = experts.shape.intermediate_size, experts.activation

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As the experts that it wraps."""
        if not self._stream.on:
            return self._paged(x, weights, experts)
        blocks = self._stream.blocks(self._layer)
        table = torch.arange(len(blocks), device=x.device) * blocks.stride(0) + blocks.data_ptr()
        out = run_experts(x.contiguous(), weights, experts, table, self._where, self._inner, self._activation)
        self._stream.used(self._layer)
        return out
