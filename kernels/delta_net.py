"""A Gated DeltaNet layer between its products: fewer launches where fused kernels serve it."""

from __future__ import annotations

from typing import Protocol

import torch


class FusedDecode(Protocol):
    """What advances rows by one token; see :func:`kernels._triton.delta_decode.delta_net_decode`."""

    def __call__(
        self,
        inner: torch.Tensor,
        conv_pages: torch.Tensor,
        state_pages: torch.Tensor,
        page: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Answers [rows, v_heads * d_v], gated and normed; in ``out`` where it is given."""
        ...


def fused_decode(
    conv: torch.Tensor,
    decay_rate: torch.Tensor,
    decay_bias: torch.Tensor,
    norm: torch.Tensor,
    heads: tuple[int, int, int, int],
    eps: float,
    l2_eps: float,
) -> FusedDecode | None:
    """What advances rows by one token for one layer; None where its parts are called one by one.

    Args:
        conv: [width, channels]; decay_rate, decay_bias: [v_heads] float32; norm: [d_v] float32.
        heads: key heads, value heads, d_k, d_v.
    """
    key_heads, value_heads, key_dim, value_dim = heads
    if not conv.is_cuda or key_dim != value_dim:
        return None
    from kernels._triton import delta_decode

    parameters = delta_decode.DeltaParameters(
        conv, decay_rate, decay_bias, norm, key_heads, value_heads, key_dim, eps, l2_eps
    )
    if not delta_decode.fits(parameters):
        return None

    def run(
        inner: torch.Tensor,
        conv_pages: torch.Tensor,
        state_pages: torch.Tensor,
        page: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return delta_decode.delta_net_decode(inner, parameters, conv_pages, state_pages, page, out)

    return run


def split_heads(
    mixed: torch.Tensor, heads: tuple[int, int, int, int], eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, L2-normed per head, queries times d_k^-0.5, and values, on a GPU.

    Args:
        mixed: [tokens, channels] behind the convolution: q, k, v side by side.
        heads: key heads, value heads, d_k, d_v.

    Returns:
        [tokens, k_heads, d_k] twice and [tokens, v_heads, d_v], contiguous, in ``dtype``.
    """
    from kernels._triton import delta_heads

    return delta_heads.split_heads(mixed, heads, eps, dtype)
