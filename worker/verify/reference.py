"""The reference of a verification: every expert dequantised by its format, the model resident on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from memory.api import PageSpec
from worker.api import ModelInfo
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner
from worker.execution.weights import WeightSource
from worker.experts.block_format import block_format
from worker.experts.pager import TableExperts
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer
from worker.models.paged import made_up_blocks
from worker.quantization.base import ExpertShape, Format
from worker.quantization.blocks import block_part
from worker.quantization.unquantized import Unquantized
from worker.scheduling.ledgers import make_ledger
from worker.verify.forcing import TeacherForced
from worker.verify.probe import Probe, Seen

_LIKELY = 20


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """What a reference makes of one step: the likeliest next tokens behind each of its tokens with their
    log-probabilities, both [tokens, n], and what the experts of every layer saw."""

    likely: torch.Tensor
    logprobs: torch.Tensor
    seen: Sequence[Seen]


class Reference(Protocol):
    """A model to compare with."""

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""
        ...

    def steps(self, prompts: Sequence[Sequence[int]]) -> Iterator[ScoredStep]:
        """The teacher-forced steps of ``prompts``, in the order of :class:`TeacherForced`."""
        ...

    def single(self, layer: int, x: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's output for one token [1, H], with weight 1."""
        ...


def reference_config(config: WorkerConfig, arena_bytes: int) -> WorkerConfig:
    """``config`` for a model that is not paged and shares no prefixes."""
    return replace(config, experts="resident", expert_bytes=0, prefix_cache=False, arena_bytes=arena_bytes)


def forced(config: WorkerConfig, specs: Sequence[PageSpec], arena_bytes: int) -> TeacherForced:
    """Plans over an empty arena of these page specs."""
    return TeacherForced(make_ledger(config, specs, arena_bytes))


def scored(logits: torch.Tensor, seen: Sequence[Seen]) -> ScoredStep:
    """A step from its logits [tokens, vocabulary]."""
    logprobs = torch.log_softmax(logits, -1)
    likely = logprobs.topk(min(_LIKELY, logprobs.shape[1]), -1).indices
    return ScoredStep(likely, logprobs.gather(1, likely), seen)


class ResidentReference:
    """All layers on the device at once."""

    def __init__(self, config: WorkerConfig, arena_bytes: int) -> None:
        """Loads the model. ConfigError, ModelLoadError."""
        self._config = reference_config(config, arena_bytes)
        self._arena_bytes = arena_bytes
        self._probe = Probe(dequantized_experts)
        self._runner = ModelRunner(self._config, self._probe)

    @property
    def info(self) -> ModelInfo:
        """See :class:`Reference`."""
        return self._runner.model_info

    def steps(self, prompts: Sequence[Sequence[int]]) -> Iterator[ScoredStep]:
        """See :class:`Reference`; a step is computed when it is asked for."""
        specs = self._runner.page_specs
        self._runner.attach_memory(specs, self._arena_bytes)
        for plan in forced(self._config, specs, self._arena_bytes).plans(prompts):
            self._probe.seen.clear()
            logits = self._runner.score(plan)
            yield scored(logits, tuple(self._probe.seen))

    def single(self, layer: int, x: torch.Tensor, expert: int) -> torch.Tensor:
        """See :class:`Reference`."""
        return self._probe.single(layer, x, expert)


def dequantized_experts(experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
    """A factory that shares with paging neither host store nor places, and neither the kernel's reading of scales nor
    that of zero points: only the product itself, so that on a CPU the outputs of sound experts are equal."""
    dtype = str(source.dtype).removeprefix("torch.")
    dense, shape = Unquantized(dtype), experts.shape
    layout, stored = dense.block_layout(shape), experts.format.block_layout(shape)
    made_up = made_up_blocks(experts, source)
    size = 0 if source.rehearsing else layout.num_bytes
    blocks = torch.empty(experts.num_experts, size, dtype=torch.uint8, device=source.device)
    for expert in range(experts.num_experts):
        if made_up is not None:
            block = made_up[expert]
        else:
            tensors = experts.read(expert)
            if source.rehearsing:
                continue
            block = torch.empty(stored.num_bytes, dtype=torch.uint8, device=source.device)
            experts.format.pack(tensors, shape, block)
        dense.pack(_plain(experts.format, block, shape), shape, blocks[expert])
    return TableExperts(blocks, block_format(layout), experts.shape.intermediate_size, experts.activation)


def _plain(format: Format, block: torch.Tensor, shape: ExpertShape) -> dict[str, torch.Tensor]:
    """The tensors of an unquantised checkpoint for one expert's block."""
    layout = format.block_layout(shape)
    gate_up, down = format.dequantize(block, shape)
    gate, up = gate_up.chunk(2)
    plain = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    if shape.has_bias:
        gate_bias, up_bias = block_part(block, layout, "gate_up_bias").chunk(2)
        plain["gate_proj.bias"], plain["up_proj.bias"] = gate_bias, up_bias
        plain["down_proj.bias"] = block_part(block, layout, "down_bias")
    return plain
