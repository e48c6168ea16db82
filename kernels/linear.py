"""Linear layers: weights in the layout that this device multiplies fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels._native import ops as native
from kernels._native.sublayers import Packed


class Linear:
    """``x @ weight.T + bias``. With few CPU threads a float32 weight is packed, and the plain one can be let go."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False
    ) -> None:
        """``weight`` [N, K]; ``bias`` [N] or None; ``deterministic``: on a GPU, that no row's bits depend on the rows
        beside it, which the library's products do not promise."""
        self._by_row = deterministic and weight.is_cuda
        self.num_columns, self.depth = weight.shape
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
                return one_row.linear_one_row(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)
