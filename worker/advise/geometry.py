"""A model's sizes: layers, experts, bytes of KV and state, weights; the values that all advice is computed from."""

from __future__ import annotations

from dataclasses import dataclass

from memory.api import DTYPE_BYTES, PageKind
from worker.advise.formats import ExpertShape, WeightFormat

KV_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One decoder layer.

    Attributes:
        kind: FULL or WINDOW for attention, STATE for linear attention.
        matrix_params: weights of the matrices that every token reads: attention, dense MLP, shared experts.
        other_params: router, norms, convolutions, biases, sinks; bf16 in every format.
        num_experts: routed experts; 0 for a dense layer.
        token_values: numbers kept per token (K and V, or MLA latents).
        token_scales: float32 scales beside them where they are FP8: one per head of K and of V; latents have none.
        index_values: numbers of a sparse-attention index kept per token.
        window: tokens that a WINDOW layer sees.
        state_bytes: of a STATE layer, per request: float32 state and bf16 convolution columns.
    """

    kind: PageKind
    matrix_params: int
    other_params: int
    num_experts: int = 0
    token_values: int = 0
    token_scales: int = 0
    index_values: int = 0
    window: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A whole model. ``embedding_params`` are read one row a token; ``head_params`` whole (0 held if ``tied``)."""

    name: str
    layers: tuple[LayerGeometry, ...]
    embedding_params: int
    head_params: int
    tied: bool
    final_params: int
    expert: ExpertShape | None
    num_experts: int
    experts_per_token: int
    max_model_len: int
    checkpoint_format: WeightFormat

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(1 for layer in self.layers if layer.num_experts)

    @property
    def num_routed_experts(self) -> int:
        """(layer, expert) pairs."""
        return sum(layer.num_experts for layer in self.layers)

    @property
    def num_params(self) -> int:
        """All weights, a tied head once, drafts not counted."""
        return self.num_dense_params + self.num_routed_experts * self._expert_params

    @property
    def num_active_params(self) -> int:
        """Weights that one token uses, embedding and head counted whole (the published "active" figure)."""
        return self.num_dense_params + self.num_moe_layers * self.experts_per_token * self._expert_params

    @property
    def num_dense_params(self) -> int:
        """All weights but the routed experts'."""
        layers = sum(layer.matrix_params + layer.other_params for layer in self.layers)
        return layers + self.embedding_params + (0 if self.tied else self.head_params) + self.final_params

    @property
    def _expert_params(self) -> int:
        return self.expert.num_params + self.expert.num_bias_params if self.expert else 0

    def dense_held_bytes(self, weights: WeightFormat) -> int:
        """Bytes on the device besides the routed experts: embedding and head (bf16) and every layer's dense part."""
        head = 0 if self.tied else self.head_params
        return self._layer_bytes(weights) + 2 * (self.embedding_params + head + self.final_params)

    def dense_read_bytes(self, weights: WeightFormat) -> int:
        """``W_dense``: bytes that a step reads whatever its tokens are; the head counts, the embedding does not."""
        return self._layer_bytes(weights) + 2 * (self.head_params + self.final_params)

    def _layer_bytes(self, weights: WeightFormat) -> int:
        matrices = sum(layer.matrix_params for layer in self.layers)
        return weights.dense_bytes(matrices) + 2 * sum(layer.other_params for layer in self.layers)

    def expert_bytes(self, weights: WeightFormat) -> int:
        """``S``: bytes of one routed expert; 0 for a dense model."""
        return weights.expert_bytes(self.expert) if self.expert else 0

    def place_bytes(self, weights: WeightFormat) -> int:
        """Bytes of one expert place in the arena."""
        return weights.place_bytes(self.expert) if self.expert else 0

    def all_experts_bytes(self, weights: WeightFormat) -> int:
        """Bytes of all routed experts, as places on the device or as blocks in the host store."""
        return self.num_routed_experts * self.place_bytes(weights)

    def all_miss_bytes(self, weights: WeightFormat) -> int:
        """Bytes over the link for one token that finds none of its experts resident."""
        return self.num_moe_layers * self.experts_per_token * self.expert_bytes(weights)

    def full_kv_bytes(self, kv_dtype: str = "bf16") -> int:
        """Bytes of FULL pages per token, sparse-attention index keys (bf16) included."""
        full = [layer for layer in self.layers if layer.kind is PageKind.FULL]
        return kv_bytes(full, kv_dtype) + 2 * sum(layer.index_values for layer in full)

    def window_kv_bytes(self, kv_dtype: str = "bf16", context: int | None = None) -> int:
        """Bytes of WINDOW pages of one request with ``context`` tokens (None: at most)."""
        total = 0
        for layer in self.layers:
            if layer.kind is PageKind.WINDOW:
                seen = layer.window if context is None else min(context, layer.window)
                total += seen * kv_bytes([layer], kv_dtype)
        return total

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state of one request."""
        return sum(layer.state_bytes for layer in self.layers)

    def request_bytes(self, context: int, kv_dtype: str = "bf16") -> int:
        """Bytes in the arena of one request with ``context`` tokens."""
        windows = self.window_kv_bytes(kv_dtype, context)
        return context * self.full_kv_bytes(kv_dtype) + windows + self.state_bytes


def kv_bytes(layers: list[LayerGeometry], kv_dtype: str) -> int:
    """Bytes per token of the attention KV of ``layers``, FP8 scales included."""
    values = DTYPE_BYTES[KV_DTYPES[kv_dtype]] * sum(layer.token_values for layer in layers)
    return values + (4 * sum(layer.token_scales for layer in layers) if kv_dtype == "fp8_e4m3" else 0)
