"""Builds paged experts: blocks are filled in the host store, straight from the checkpoint, one expert at a time."""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

import torch

from memory.device.host_experts import HostExperts, LayerBlocks
from worker.config import WorkerConfig
from worker.errors import ConfigError
from worker.execution.weights import WeightSource
from worker.experts.block_format import block_format
from worker.experts.identity import shared_name
from worker.experts.miss_lane import LayerShape
from worker.experts.pager import ExpertPager, PagedExperts, PagerOptions, TableExperts
from worker.experts.plan import store_plan
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer
from worker.models.random_blocks import fill_random_blocks
from worker.probe import pinnable_bytes

log = logging.getLogger(__name__)


@runtime_checkable
class PagingFactory(Protocol):
    """An expert factory whose experts are paged: asked for the pager when the model is built."""

    def finish(self, device: torch.device) -> ExpertPager:
        """The pager."""
        ...


class PagedFactory:
    """The factory for ``experts=paged``: the rehearsal says how large the store must be, the real pass fills it.

    Extra memory while loading is one expert's tensors, or one layer's where the checkpoint stacks them.
    """

    def __init__(self, options: PagerOptions, shared_name: str | None = None) -> None:
        """``shared_name``: of the shared host store that replicas with the same checkpoint use; None: a private one."""
        self._options = options
        self._shared_name = shared_name
        self._blocks: dict[int, LayerBlocks] = {}
        self._pager: ExpertPager | None = None

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        """Reads a layer; see :class:`worker.models.base.ExpertFactory`."""
        layout = experts.format.block_layout(experts.shape)
        if source.rehearsing:
            self._blocks[experts.layer] = LayerBlocks(experts.num_experts, layout.num_bytes)
            for expert in range(experts.num_experts):
                experts.read(expert)
            return _Rehearsed()
        if self._pager is None:
            self._pager = ExpertPager(self._open_store(source.device), self._options)
        host = self._pager.host
        if not host.is_filled:
            self._fill(host, experts, source)
        where, inner = block_format(layout), experts.shape.intermediate_size
        if layout.num_bytes == host.place_bytes:
            self._pager.layer_shape = LayerShape(
                where,
                inner,
                experts.activation,
                experts.shape.hidden_size,
                experts.experts_per_token,
                source.dtype,
            )
        return PagedExperts(self._pager, experts.layer, where, inner, experts.activation)

    def _fill(self, host: HostExperts, experts: ExpertLayer, source: WeightSource) -> None:
        made_up = made_up_blocks(experts, source)
        if made_up is not None:
            host.fill(experts.layer, made_up)
            return
        for expert in range(experts.num_experts):
            experts.format.pack(experts.read(expert), experts.shape, host.block(experts.layer, expert))
        host.seal_layer(experts.layer, source.device)

    def _open_store(self, device: torch.device) -> HostExperts:
        """Takes the host's memory, once it is clear that the machine has it, and pins it for a GPU. ConfigError where
        that cannot be."""
        num_bytes = sum(entry.num_experts * entry.block_bytes for entry in self._blocks.values())
        fits, sentence = store_plan(num_bytes, *pinnable_bytes(), on_gpu=device.type == "cuda")
        # A shared store may be there already, and then takes nothing of what is left.
        if not fits and self._shared_name is None:
            raise ConfigError([f"experts='paged': {sentence}"])
        log.info("%s", sentence)
        host = HostExperts(self._blocks, self._shared_name)
        if device.type == "cuda":
            if (reason := host.pin()) is not None:
                raise ConfigError([f"experts='paged': {reason}"])
            log.info("host store: laid out and pinned in %.1f s", host.pinning_s)
        return host

    def finish(self, device: torch.device) -> ExpertPager:
        """The pager, all layers read. ConfigError for a model without routed experts."""
        if self._pager is None:
            raise ConfigError(
                ["experts='paged': this model has no routed experts; experts=resident serves it"]
            )
        self._pager.host.complete()
        return self._pager


class _Rehearsed:
    """Stands where experts will be; never called."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a rehearsal computes nothing")


def paged_factory(config: WorkerConfig) -> PagedFactory:
    """The factory that a worker's settings ask for."""
    options = PagerOptions(config.expert_bytes, deterministic=config.deterministic, miss_lane="measured")
    return PagedFactory(options, shared_name(config))


def table_experts(experts: ExpertLayer, source: WeightSource, deterministic: bool = False) -> RoutedExperts:
    """The factory that keeps every expert's block on the device, at constant addresses, for the same kernel that paged
    experts use: ``experts=resident`` on a GPU."""
    layout = experts.format.block_layout(experts.shape)
    blocks = made_up_blocks(experts, source)
    if blocks is None:
        size = 0 if source.rehearsing else layout.num_bytes
        blocks = torch.empty(experts.num_experts, size, dtype=torch.uint8, device=source.device)
        for expert in range(experts.num_experts):
            tensors = experts.read(expert)
            if not source.rehearsing:
                experts.format.pack(tensors, experts.shape, blocks[expert])
    if source.rehearsing:
        return _Rehearsed()
    inner = experts.shape.intermediate_size
    return TableExperts(blocks, block_format(layout), inner, experts.activation, deterministic)


def made_up_blocks(experts: ExpertLayer, source: WeightSource) -> torch.Tensor | None:
    """Random weights of a layer as [experts, block_bytes] uint8 on a GPU, drawn in the blocks; None elsewhere, where
    each expert is drawn and packed as a checkpoint's."""
    if source.device.type != "cuda":
        return None
    generator = source.drawer(f"layers.{experts.layer}.experts")
    if generator is None:
        return None
    layout = experts.format.block_layout(experts.shape)
    blocks = torch.zeros(experts.num_experts, layout.num_bytes, dtype=torch.uint8, device=source.device)
    fill_random_blocks(blocks, layout, experts.shape, generator)
    return blocks
