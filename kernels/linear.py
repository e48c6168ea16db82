"""Linear layers: weights in the layout that this device multiplies fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels._native import ops as native
from kernels._native.sublayers import Packed

ALIGNED_ROWS = 8
"""Where rows of two-byte values begin at whole lines of 16 bytes, a GPU's library has its best kernels: without, 8,192
tokens by [1281, 2048] took 1.16 ms on an H200, a twentieth of its rate."""


def aligned_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``weight`` [N, K] and ``bias`` [N] with zero rows behind, up to a multiple of :data:`ALIGNED_ROWS`."""
    extra = -weight.shape[0] % ALIGNED_ROWS
    if extra == 0:
        return weight, bias
    return F.pad(weight, (0, 0, 0, extra)), None if bias is None else F.pad(bias, (0, extra))


class Linear:
    """``x @ weight.T + bias``. With few CPU threads a float32 weight is packed, and the plain one can be let go."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False
    ) -> None:
        """``weight`` [N, K]; ``bias`` [N] or None; ``deterministic``: on a GPU, that no row's bits depend on the rows
        beside it, which the library's products do not promise."""
        self._by_row = deterministic and weight.is_cuda
        self.num_columns, self.depth = weight.shape
        if weight.is_cuda and weight.element_size() == 2 and not deterministic:
            weight, bias = aligned_rows(weight, bias)
        self._packed = native.serves(weight) and torch.get_num_threads() <= native.MANY_THREADS
        self._weight = native.pack_weight(weight) if self._packed else weight
        self._bias = bias

    @property
    def packed(self) -> Packed | None:
        """The layer as the compiled kernels for whole sublayers take it; None where it is not theirs."""
        if not self._packed:
            return None
        return Packed(self._weight, self._bias, self.num_columns, self.depth)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, K] to [rows, N]."""
        if self._packed:
            return native.linear(
                x if x.stride(1) == 1 else x.contiguous(), self._weight, self.num_columns, self._bias
            )
        if self._by_row:
            from kernels._triton import linear as on_gpu

            return on_gpu.linear(x if x.stride(1) == 1 else x.contiguous(), self._weight, self._bias)
        if x.is_cuda and x.shape[0] == 1:
            from kernels._triton import one_row

            if one_row.serves(x, self._weight):
                return self._cut(one_row.linear_one_row(x, self._weight, self._bias))
        return self._cut(F.linear(x, self._weight, self._bias))

    def _cut(self, out: torch.Tensor) -> torch.Tensor:
        return out if out.shape[1] == self.num_columns else out[:, : self.num_columns]

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[rows, K] to ``out`` [rows, N] in x's dtype, which it answers."""
        own_kernel = self._by_row or x.shape[0] == 1 or self._weight.shape[0] != self.num_columns
        if x.is_cuda and self._bias is None and not own_kernel:
            return torch.mm(x, self._weight.t(), out=out)
        return out.copy_(self(x))
