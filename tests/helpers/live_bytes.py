"""Counts the bytes of all tensors that are alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sees every storage that an operation makes on the host, until it is let go.

    Attributes:
        now, peak: bytes of those alive, now and at most. Tensors made before do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        if storage._cdata in self._known or storage.nbytes() == 0:
            return
        self._known[storage._cdata] = storage
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes
