"""Linear layers: weights in the layout that this device multiplies fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels._native import ops as native


class Linear:
    """``x @ weight.T + bias``. With few CPU threads a float32 weight is packed, and the plain one can be let go."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """``weight`` [N, K]; ``bias`` [N] or None."""
        self.num_columns = weight.shape[0]
        self._packed = native.serves(weight) and torch.get_num_threads() <= native.MANY_THREADS
        self._weight = native.pack_weight(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, K] to [rows, N]."""
        if self._packed:
            return native.linear(
                x if x.stride(1) == 1 else x.contiguous(), self._weight, self.num_columns, self._bias
            )
        return F.linear(x, self._weight, self._bias)
