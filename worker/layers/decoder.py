"""The decoder that all families share: embedding, layers of mixer and MLP with residuals, final norm, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class Mlp(Protocol):
    """A sublayer that treats every token alone."""

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens, H] to [tokens, H]."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: ``x += mixer(norm(x)); x += mlp(norm(x))``. Norm weights are float32, one added where zero-centred."""

    mixer_norm: torch.Tensor
    mixer: Mixer
    mlp_norm: torch.Tensor
    mlp: Mlp


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
        deterministic: bool = False,
    ) -> None:
        """``embedding`` and ``head`` [vocabulary, H] (one tensor where tied)."""
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = Linear(head, deterministic=deterministic)
        self._rope = rope
        self._eps = eps

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Values of the residual stream per token."""
        return self._embedding.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self._embedding.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 to [tokens, H]."""
        return self._embedding.index_select(0, token_ids)

    def enter(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens] int64 to the residual stream [tokens, H] and what the first layer's mixer takes of it."""
        x = self.embed(token_ids)
        return x, rms_norm(x, self._layers[0].mixer_norm, self._eps)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """What all layers of a step share: the rotary tables of its [tokens] positions."""
        return self._rope(positions)

    def advance(
        self,
        number: int,
        x: torch.Tensor,
        normed: torch.Tensor,
        rotation: Rotation,
        context: ForwardContext,
    ) -> torch.Tensor:
        """One layer: changes the stream ``x`` in place and answers what the next layer's mixer (behind the last one:
        the head) takes of it. Each sublayer's output joins the stream together with the norm that comes behind it."""
        layer = self._layers[number]
        last = number + 1 == len(self._layers)
        behind = self._final_norm if last else self._layers[number + 1].mixer_norm
        normed = add_norm(x, layer.mixer(normed, rotation, context), layer.mlp_norm, self._eps)
        return add_norm(x, layer.mlp(normed, context), behind, self._eps)

    def forward(
        self, token_ids: torch.Tensor, context: ForwardContext, taps: frozenset[int] = frozenset()
    ) -> HiddenStates:
        """Runs a step's [tokens] through all layers; ``taps`` names layers whose input is wanted."""
        rotation = self.rotation(context.positions)
        x, normed = self.enter(token_ids)
        tapped: dict[int, torch.Tensor] = {}
        for number in range(len(self._layers)):
            if number in taps:
                tapped[number] = x.clone()
            normed = self.advance(number, x, normed, rotation, context)
        if len(self._layers) in taps:
            tapped[len(self._layers)] = x
        return HiddenStates(normed, tapped)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, H] behind the final norm to [rows, vocabulary] float32; into ``out``, which is of activations' dtype,
        where it is given."""
        return self._head(hidden).float() if out is None else self._head.into(hidden, out)
