"""Calls the compiled kernels for whole sublayers of a decode step: one call where there would be a dozen."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch

from kernels._native import ops
from kernels._native.library import AttentionProjections, Bank, DeltaNet, Layer, Moe, library

LINE = 16
"""Scratch is laid out in whole vectors of so many floats."""

BRIEF_PRODUCTS = 1 << 25
"""Multiplications of a call, about half a millisecond, that may keep Python's lock; longer ones let others run."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear layer in the layout of :func:`kernels._native.ops.pack_weight`, [columns, depth] before."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    depth: int

    @property
    def products(self) -> int:
        """Multiplications per row."""
        return self.columns * self.depth

    @property
    def layer(self) -> Layer:
        """The layer as C sees it; the tensors must outlive it."""
        bias = None if self.bias is None else self.bias.data_ptr()
        half = self.weight.dtype is torch.bfloat16
        return Layer(self.weight.data_ptr(), bias, self.columns, self.depth, half)


class _Call:
    """One kernel, by how long it will take."""

    def __init__(self, name: str, products_per_row: int) -> None:
        loaded = library()
        assert loaded is not None
        self._brief, self._long = getattr(loaded.quick, name), getattr(loaded.long, name)
        self._most_rows = BRIEF_PRODUCTS // products_per_row

    def over(self, rows: int) -> Any:
        """The function for so many rows."""
        return self._brief if rows <= self._most_rows else self._long


def _scratch(*sizes: int) -> torch.Tensor:
    return torch.empty(sum(-(-size // LINE) * LINE for size in sizes))


def _few_dense_rows(x: torch.Tensor) -> bool:
    return ops.serves(x) and x.shape[0] <= ops.MANY_TOKENS and x.is_contiguous()


def _side_by_side(pages: torch.Tensor) -> bool:
    """Whether a page of [pages, a, b (, c)] is one run of memory."""
    inner = pages.shape[1:]
    expected = [1]
    for size in reversed(inner[1:]):
        expected.append(expected[-1] * size)
    return ops.serves(pages) and list(pages.stride()[1:]) == expected[::-1]


class MoeStep:
    """Router, routing, resident experts, shared expert."""

    def __init__(
        self,
        router: Packed,
        bank: Bank,
        experts_per_token: int,
        renormalise: bool,
        shared_size: int,
        shared_down: Packed | None,
        kept: tuple[Any, ...],
    ) -> None:
        """``kept``: what ``bank`` points into."""
        self._kept = (router, shared_down, kept)
        down = Layer() if shared_down is None else shared_down.layer
        self._moe = Moe(router.layer, down, bank, experts_per_token, shared_size, renormalise)
        self._ref = byref(self._moe)
        # Per row: ids of 8 bytes, weights, the router's columns, the shared expert's middle and its result.
        self._widths = (2 * experts_per_token, experts_per_token, router.columns, shared_size, bank.hidden)
        products = router.products + (0 if shared_down is None else shared_down.products)
        self._call = _Call("moe_step", products + experts_per_token * 3 * bank.hidden * bank.inner)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it serves these tokens [tokens, H]."""
        return _few_dense_rows(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, H] to [tokens, H]."""
        rows, hidden = x.shape
        out = torch.empty(rows, hidden)
        scratch = _scratch(*(rows * width for width in self._widths))
        self._call.over(rows)(self._ref, x.data_ptr(), rows, scratch.data_ptr(), out.data_ptr())
        return out


class DeltaNetStep:
    """Gated DeltaNet from hidden states to hidden states, one token per row."""

    def __init__(
        self,
        inner: Packed,
        outer: Packed,
        conv: torch.Tensor,
        decay_rate: torch.Tensor,
        decay_bias: torch.Tensor,
        norm: torch.Tensor,
        heads: tuple[int, int, int, int],
        eps: float,
        l2_eps: float,
    ) -> None:
        """``heads``: key heads, value heads, their dims; ``conv`` [width, channels]; all tensors contiguous float32."""
        k_heads, v_heads, d_k, d_v = heads
        self._kept = (inner, outer, conv, decay_rate, decay_bias, norm)
        self._net = DeltaNet(
            inner.layer,
            outer.layer,
            conv.data_ptr(),
            decay_rate.data_ptr(),
            decay_bias.data_ptr(),
            norm.data_ptr(),
            *heads,
            conv.shape[0],
            d_k**-0.5,
            l2_eps,
            eps,
        )
        self._ref = byref(self._net)
        self._widths = (inner.columns, 3 * v_heads, conv.shape[1], 2 * k_heads * d_k, v_heads * d_v)
        products = inner.products + outer.products + 4 * v_heads * d_k * d_v
        self._call = _Call("delta_net_step", products)

    def takes(self, x: torch.Tensor, conv_pages: torch.Tensor, state_pages: torch.Tensor) -> bool:
        """Whether it serves these tokens and pages."""
        return _few_dense_rows(x) and _side_by_side(conv_pages) and _side_by_side(state_pages)

    def __call__(
        self, x: torch.Tensor, conv_pages: torch.Tensor, state_pages: torch.Tensor, page: torch.Tensor
    ) -> torch.Tensor:
        """[rows, H] to [rows, H]; ``page`` [rows] int64: the pages of both views that are advanced by a token."""
        rows, hidden = x.shape
        out = torch.empty(rows, hidden)
        scratch = _scratch(*(rows * width for width in self._widths))
        self._call.over(rows)(
            self._ref,
            x.data_ptr(),
            rows,
            conv_pages.data_ptr(),
            conv_pages.stride(0),
            state_pages.data_ptr(),
            state_pages.stride(0),
            page.data_ptr(),
            scratch.data_ptr(),
            out.data_ptr(),
        )
        return out


class AttentionStep:
    """What stands before attention (projection, head norms, rotary embedding, keys and values to their pages) and
    behind it (gate, projection)."""

    def __init__(
        self,
        inner: Packed,
        outer: Packed,
        head_norm: torch.Tensor | None,
        heads: tuple[int, int, int],
        gated: bool,
        eps: float,
    ) -> None:
        """``heads``: query heads, key heads, dim; ``head_norm`` [query and key heads, dim] float32 or None."""
        self._heads, self._turned, self._dim = heads[0], heads[0] + heads[1], heads[2]
        self._row = tuple(heads[1:])
        self._normed = head_norm is not None
        self._columns, self._hidden = inner.columns, outer.columns
        self._kept = (inner, outer, head_norm)
        norm = None if head_norm is None else head_norm.data_ptr()
        self._layer = AttentionProjections(inner.layer, outer.layer, norm, *heads, eps, gated)
        self._ref = byref(self._layer)
        self._front = _Call("attention_front", inner.products)
        self._back = _Call("attention_back", outer.products)

    def takes(self, x: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor) -> bool:
        """Whether it serves these tokens and pages."""
        return _few_dense_rows(x) and self._dense(key_pages) and self._dense(value_pages)

    def _dense(self, pages: torch.Tensor) -> bool:
        return ops.serves(pages) and pages.stride()[2:] == (self._dim, 1) and pages.shape[2:] == self._row

    def front(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        page: torch.Tensor,
        offset: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [rows, heads, dim] of [rows, H], and what :meth:`back` wants; cos and sin contiguous."""
        rows = x.shape[0]
        inner = torch.empty(rows, self._columns)
        if self._normed:
            turned = torch.empty(rows, self._turned, self._dim)
        else:
            turned = inner[:, : self._turned * self._dim].view(rows, self._turned, self._dim)
        self._front.over(rows)(
            self._ref,
            x.data_ptr(),
            x.stride(0),
            rows,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            key_pages.data_ptr(),
            *key_pages.stride()[:2],
            value_pages.data_ptr(),
            *value_pages.stride()[:2],
            page.data_ptr(),
            offset.data_ptr(),
            inner.data_ptr(),
            turned.data_ptr(),
        )
        return turned[:, : self._heads], inner

    def back(self, mixed: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """[rows, H] of attention's [rows, heads, dim], which is contiguous and may be changed."""
        rows = mixed.shape[0]
        out = torch.empty(rows, self._hidden)
        self._back.over(rows)(self._ref, mixed.data_ptr(), inner.data_ptr(), rows, out.data_ptr())
        return out
