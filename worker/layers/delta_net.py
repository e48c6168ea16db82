"""Gated DeltaNet: linear attention with a recurrent state per request (Yang et al., "Gated delta networks")."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.delta_net import fused_decode, split_heads
from kernels.linear import Linear
from kernels.pointwise import gated_norm, l2_norm
from kernels.recurrent import (
    causal_conv_rows,
    causal_conv_step,
    chunked_problem,
    delta_gates,
    delta_rule_chunks,
    delta_rule_step,
)
from kernels.sublayers import delta_net_step
from memory.api import LayerRows, Row
from worker.execution.context import ForwardContext
from worker.layers.attention import Rotation

_FEW_TOKENS = 64
"""Rows of so many tokens are done one by one sooner than the chunked kernels are launched."""
_L2_EPS = 1e-6
"""Of the norms of queries and keys: part of the layer, not of its configuration."""


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """Heads of one Gated DeltaNet layer; consecutive value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def rows(self, layer: int, conv_dtype: str) -> LayerRows:
        """What one recurrent state holds for this layer."""
        return LayerRows(
            layer,
            (
                Row("conv", (self.conv_width - 1, self.conv_channels), conv_dtype),
                Row("state", (self.num_value_heads, self.key_dim, self.value_dim), "float32"),
            ),
        )


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Tensors of one Gated DeltaNet layer.

    Attributes:
        inner: rows of q, k, v (conv_channels), z (v_heads * d_v), b (v_heads), a (v_heads); [.., H].
        conv: [width, conv_channels].
        decay_rate: [v_heads] float32, ``-exp(A_log)``; decay_bias: [v_heads] float32, ``dt_bias``.
        norm: [d_v] float32; outer: [H, v_heads * d_v].
    """

    inner: torch.Tensor
    conv: torch.Tensor
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    outer: torch.Tensor


class DeltaNetLayer:
    """One Gated DeltaNet sublayer."""

    def __init__(
        self,
        layer: int,
        sizes: DeltaNetSizes,
        weights: DeltaNetWeights,
        eps: float,
        deterministic: bool = False,
    ) -> None:
        self._layer = layer
        self._sizes = sizes
        self._inner = Linear(weights.inner, deterministic=deterministic)
        self._outer = Linear(weights.outer, deterministic=deterministic)
        device, dtype = weights.outer.device, weights.outer.dtype
        self._chunked = not deterministic and chunked_problem(device, dtype) is None
        self._conv = weights.conv
        self._decay_rate = weights.decay_rate
        self._decay_bias = weights.decay_bias
        self._norm = weights.norm
        self._eps = eps
        heads = (sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
        self._head_sizes = heads
        # Its sums are in another order than those of rows of many tokens.
        self._fused = None
        if not deterministic:
            self._fused = fused_decode(
                weights.conv, weights.decay_rate, weights.decay_bias, weights.norm, heads, eps, _L2_EPS
            )
        self._whole = delta_net_step(
            self._inner,
            self._outer,
            weights.conv,
            weights.decay_rate,
            weights.decay_bias,
            weights.norm,
            heads,
            eps,
            _L2_EPS,
        )

    def __call__(self, x: torch.Tensor, rotation: Rotation, context: ForwardContext) -> torch.Tensor:
        """[tokens, H] to [tokens, H]; rows' states advance."""
        assert context.state is not None
        if self._whole is not None and context.num_decode_rows == x.shape[0]:
            pages = context.views[self._layer, "conv"], context.views[self._layer, "state"]
            if self._whole.takes(x, *pages):
                return self._whole(x, *pages, context.state.decode_page)
        sizes = self._sizes
        channels, heads = sizes.conv_channels, sizes.num_value_heads
        inner = self._inner(x)
        values = heads * sizes.value_dim
        rows, total = context.num_decode_rows, x.shape[0]
        out = torch.empty(total, values, dtype=inner.dtype, device=inner.device)
        behind = out
        fused = self._fused if rows else None
        if fused is not None:
            pages = context.views[self._layer, "conv"], context.views[self._layer, "state"]
            with context.beside():
                fused(inner[:rows], *pages, context.state.decode_page, out[:rows])
            if rows == total:
                context.join()
                return self._outer(out)
            inner, behind, total, rows = inner[rows:], out[rows:], total - rows, 0
        z = inner[:, channels : channels + values]
        gates = delta_gates(inner[:, channels + values :], self._decay_bias, self._decay_rate)
        log_decay, decay, beta = gates
        parts = []
        if rows:
            parts.append(self._step(inner[:rows, :channels], decay[:rows], beta[:rows], context))
        if rows < total:
            chunked = self._chunked and context.state.longest > _FEW_TOKENS
            exponential = None if chunked else decay[rows:]
            parts.append(
                self._chunks(inner[rows:, :channels], log_decay[rows:], exponential, beta[rows:], context)
            )
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        gated_norm(mixed, z, self._norm, self._eps, behind)
        if fused is not None:  # waiting for a stream that is not part of a capture would end it
            context.join()
        return self._outer(out)

    def _step(
        self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        assert context.state is not None
        page = context.state.decode_page
        mixed = causal_conv_step(mixed, self._conv, context.views[self._layer, "conv"], page)
        query, key, value = self._heads(mixed)
        state_pages = context.views[self._layer, "state"]
        return delta_rule_step(query, key, value, decay, beta, state_pages, page)

    def _chunks(
        self,
        mixed: torch.Tensor,
        log_decay: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        assert context.state is not None
        assert context.state.layout is not None
        page, layout = context.state.chunk_page, context.state.layout
        conv_pages = context.views[self._layer, "conv"]
        mixed = causal_conv_rows(mixed, self._conv, conv_pages, page, layout)
        if mixed.is_cuda and decay is None:
            query, key, value = split_heads(mixed, self._head_sizes, _L2_EPS, torch.bfloat16)
        else:
            query, key, value = self._heads(mixed)
        state_pages = context.views[self._layer, "state"]
        return delta_rule_chunks(query, key, value, log_decay, beta, state_pages, page, layout, decay)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (scaled) and k L2-normed per head, v; float32."""
        sizes = self._sizes
        wide, num_tokens = mixed.float(), mixed.shape[0]
        keys = 2 * sizes.num_key_heads * sizes.key_dim
        normed = l2_norm(wide[:, :keys].view(num_tokens, -1, sizes.key_dim), _L2_EPS)
        query = normed[:, : sizes.num_key_heads] * sizes.key_dim**-0.5
        value = wide[:, keys:].view(num_tokens, -1, sizes.value_dim)
        return query, normed[:, sizes.num_key_heads :], value
