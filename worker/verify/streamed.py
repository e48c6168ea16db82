"""The reference for models that do not fit: layer by layer over all steps, one layer's weights in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from memory.api import PageSpec
from memory.device.arena import Arena
from worker.api import ModelInfo
from worker.attention.choice import choose_backend
from worker.config import WorkerConfig
from worker.execution.batch import BatchBuilder
from worker.execution.loading import OpenedModel, open_model
from worker.execution.runner import DEFAULT_PAGE_TOKENS
from worker.execution.staging import make_uploads
from worker.execution.weights import WeightSource
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer, Model
from worker.verify.probe import Probe, Seen
from worker.verify.reference import ScoredStep, dequantized_experts, forced, reference_config, scored

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ENDS = -1
"""Stands for what belongs to no layer: embedding, final norm, head."""


class LayerSource(WeightSource):
    """Gives the weights of one layer alone; all others come without bytes. The vectors of the layer behind it come
    too, since a layer ends with the norm of the next."""

    def __init__(self, opened: OpenedModel, number: int) -> None:
        """``number`` of the layer, or -1 for embedding, final norm and head."""
        super().__init__(opened.store, opened.device, opened.dtype)
        self._number = number

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        init: str = "normal",
        dtype: torch.dtype | None = None,
        raw: bool = False,
    ) -> torch.Tensor:
        """See :meth:`WeightSource.take`."""
        found = _LAYER.search(name)
        number = int(found[1]) if found is not None else _ENDS
        behind = len(shape) == 1 and number in (self._number + 1, _ENDS)
        if number == self._number or behind:
            return super().take(name, shape, init=init, dtype=dtype, raw=raw)
        return torch.empty(shape, dtype=torch.uint8 if raw else dtype or self.dtype, device="meta")


class _OneLayer:
    """Builds the experts of one layer and reads none of the others'."""

    def __init__(self, number: int, probe: Probe) -> None:
        self._number, self._probe = number, probe

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        return self._probe(experts, source) if experts.layer == self._number else _absent


def _absent(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the experts of another layer were not read")


@dataclass(slots=True)
class _Stream:
    """One step between two layers: its residual stream, the next layer's input, and what experts have seen."""

    x: torch.Tensor
    normed: torch.Tensor
    seen: list[Seen] = field(default_factory=list)


class StreamedReference:
    """The same kernels over the same steps as :class:`worker.verify.reference.ResidentReference`, in another order:
    each layer is read, carries all steps, and is let go. In memory at once: a layer's weights (or embedding and head),
    the steps' hidden states, and the arena. What experts saw waits on the host."""

    def __init__(self, config: WorkerConfig, arena_bytes: int) -> None:
        """Checks the checkpoint; nothing of it is read before :meth:`steps`. ConfigError, ModelLoadError."""
        self._config = reference_config(config, arena_bytes)
        self._arena_bytes = arena_bytes
        self._opened = open_model(self._config, dequantized_experts)
        skeleton = self._opened.build(
            WeightSource(self._opened.store, torch.device("meta"), self._opened.dtype)
        )
        self.info: ModelInfo = self._opened.info(skeleton)
        self._conv_width = skeleton.conv_width
        page_tokens = config.page_tokens or DEFAULT_PAGE_TOKENS
        self.page_specs: tuple[PageSpec, ...] = tuple(g.page_spec(page_tokens) for g in skeleton.groups)
        self._shapes = {g.name: g.attention for g in skeleton.groups if g.attention is not None}
        self._backend = choose_backend(self._config, tuple(self._shapes.values()), self._opened.device)
        self._prompts: Sequence[Sequence[int]] = ()
        self._steps: tuple[ScoredStep, ...] = ()
        self._single: tuple[int, Probe] | None = None

    def steps(self, prompts: Sequence[Sequence[int]]) -> Iterator[ScoredStep]:
        """See :class:`worker.verify.reference.Reference`. All are computed when the first is asked for, and kept."""
        if prompts != self._prompts:
            self._single = None
            self._steps = self._stream(prompts)
            self._prompts = prompts
        return iter(self._steps)

    def single(self, layer: int, x: torch.Tensor, expert: int) -> torch.Tensor:
        """See :class:`worker.verify.reference.Reference`; the layer is read again."""
        if self._single is None or self._single[0] != layer:
            self._single = None
            self._single = layer, self._build(layer)[1]
        return self._single[1].single(layer, x, expert)

    def _build(self, number: int) -> tuple[Model, Probe]:
        probe = Probe(dequantized_experts)
        return self._opened.build(LayerSource(self._opened, number), _OneLayer(number, probe)), probe

    @torch.inference_mode()
    def _stream(self, prompts: Sequence[Sequence[int]]) -> tuple[ScoredStep, ...]:
        streams = self._enter(prompts)
        name = f"Reference of {self.info.name}, layer by layer"
        for number in tqdm(range(self.info.num_layers), name, unit="layer", disable=None, leave=False):
            self._carry(number, prompts, streams)
        ends, _ = self._build(_ENDS)
        found = []
        for stream in streams:
            step = scored(ends.decoder.logits(stream.normed), tuple(stream.seen))
            found.append(ScoredStep(step.likely.cpu(), step.logprobs.cpu(), step.seen))
        return tuple(found)

    def _enter(self, prompts: Sequence[Sequence[int]]) -> list[_Stream]:
        ends, _ = self._build(_ENDS)
        streams = []
        for plan in forced(self._config, self.page_specs, self._arena_bytes).plans(prompts):
            token_ids = torch.from_numpy(plan.token_ids).to(self._opened.device)
            streams.append(_Stream(*ends.decoder.enter(token_ids)))
        return streams

    def _carry(self, number: int, prompts: Sequence[Sequence[int]], streams: Sequence[_Stream]) -> None:
        """Takes all steps through one layer, each behind those whose keys and states it reads."""
        model, probe = self._build(number)
        arena = Arena(self.page_specs, self._arena_bytes, self._opened.device)
        builder = BatchBuilder(arena, self._shapes, self._backend, self._conv_width)
        given = torch.zeros(0, dtype=torch.int64, device=self._opened.device)
        uploads = make_uploads(self._opened.device)
        plans = forced(self._config, self.page_specs, self._arena_bytes).plans(prompts)
        for plan, stream in zip(plans, streams, strict=True):
            uploads.begin()
            arena.apply(plan.commands)
            context = builder.build(plan, given, uploads).context
            probe.seen.clear()
            rotation = model.decoder.rotation(context.positions)
            stream.normed = model.decoder.advance(number, stream.x, stream.normed, rotation, context)
            stream.seen += [seen.to(torch.device("cpu")) for seen in probe.seen]
