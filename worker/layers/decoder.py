"""The decoder that all families share: embedding, layers of mixer and MLP with residuals, final norm, head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.linear import Linear
from kernels.pointwise import add_norm, rms_norm
from worker.execution.context import ForwardContext
from worker.layers.attention import Rope, Rotation


class Mixer(Protocol):
    """A sublayer that mixes tokens of a row."""

    def __call__(self, x: torch.Tensor, rotation: Rotation, context: ForwardContext) -> torch.Tensor:
        """[tokens, H] to [tokens, H]."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: ``x += mixer(norm(x)); x += mlp(norm(x))``. Norm weights are float32, one added where zero-centred."""

    mixer_norm: torch.Tensor
    mixer: Mixer
    mlp_norm: torch.Tensor
    mlp: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a forward pass brings: ``final`` [tokens, H] behind the final norm, and the tapped layer inputs by layer
    number (``layers[n]`` is the residual stream that enters layer n; n = number of layers: before the final norm)."""

    final: torch.Tensor
    layers: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Decoder:
    """A stack of decoder layers."""

    def __init__(
        self,
        embedding: torch.Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: torch.Tensor,
        head: torch.Tensor,
        rope: Rope,
        eps: float,
    ) -> None:
        """``embedding`` and ``head`` [vocabulary, H] (one tensor where tied)."""
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = Linear(head)
        self._rope = rope
        self._eps = eps

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 to [tokens, H]."""
        return self._embedding.index_select(0, token_ids)

    def forward(
        self, token_ids: torch.Tensor, context: ForwardContext, taps: frozenset[int] = frozenset()
    ) -> HiddenStates:
        """Runs a step's [tokens] through all layers; ``taps`` names layers whose input is wanted."""
        rotation = self._rope(context.positions)
        x = self.embed(token_ids)
        tapped: dict[int, torch.Tensor] = {}
        # Each sublayer's output joins the stream x together with the norm that comes behind it.
        norms = [layer.mixer_norm for layer in self._layers[1:]] + [self._final_norm]
        normed = rms_norm(x, self._layers[0].mixer_norm, self._eps)
        for number, layer in enumerate(self._layers):
            if number in taps:
                tapped[number] = x.clone()
            normed = add_norm(x, layer.mixer(normed, rotation, context), layer.mlp_norm, self._eps)
            normed = add_norm(x, layer.mlp(normed), norms[number], self._eps)
        if len(self._layers) in taps:
            tapped[len(self._layers)] = x
        return HiddenStates(normed, tapped)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] behind the final norm to [rows, vocabulary] float32."""
        return self._head(hidden).float()
