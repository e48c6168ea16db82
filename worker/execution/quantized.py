"""Shows the dense layers of a quantised checkpoint as plain weights; tensors of routed experts pass as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from worker.errors import ModelLoadError
from worker.execution.weights import TensorStore

_EXPERTS = ".experts."


@runtime_checkable
class DenseFormat(Protocol):
    """A weight format in which checkpoints also keep attention and dense MLPs."""

    def linear_suffixes(self) -> tuple[str, ...]:
        """Names below a linear layer that make up its weight; the first says that it is quantised."""
        ...

    def linear_shape(self, suffix: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """[rows, columns] of a weight by the shape of its tensor ``suffix``, the first of the suffixes or
        ``weight``."""
        ...

    def dequantize_linear(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The float32 weight [rows, columns] out of its tensors by suffix."""
        ...


class DequantizedStore:
    """A :class:`TensorStore` in which every dense linear has one ``weight``."""

    def __init__(self, store: TensorStore, format: DenseFormat) -> None:
        self._store = store
        self._format = format
        self._suffixes = format.linear_suffixes()
        marker = f".{self._suffixes[0]}"
        names = store.names()
        self._linears = {
            name.removesuffix(marker) for name in names if name.endswith(marker) and _EXPERTS not in name
        }
        hidden = {f"{linear}.{suffix}" for linear in self._linears for suffix in self._suffixes}
        plain = [name for name in names if name not in hidden]
        self._names = (*plain, *(f"{linear}.weight" for linear in sorted(self._linears)))

    def names(self) -> Sequence[str]:
        """Names as a checkpoint without quantisation would have them, but for the experts."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the plain weight."""
        linear = name.removesuffix(".weight")
        if linear not in self._linears:
            return self._store.shape(name)
        suffix = "weight" if "weight" in self._suffixes else self._suffixes[0]
        stored = self._store.shape(f"{linear}.{suffix}")
        return None if stored is None else self._format.linear_shape(suffix, stored)

    def read(self, name: str, shape: tuple[int, ...], init: str, device: torch.device) -> torch.Tensor:
        """The tensor; a quantised linear's weight in float32. ModelLoadError where a part of it is missing."""
        linear = name.removesuffix(".weight")
        if linear not in self._linears:
            tensor = self._store.read(name, shape, init, device)
            if tensor.dtype is torch.float8_e4m3fn and _EXPERTS not in name:
                raise ModelLoadError(
                    f"{name} is in FP8, but the checkpoint lacks {linear}.{self._suffixes[0]}"
                )
            return tensor
        found = {}
        for suffix in self._suffixes:
            stored = self._store.shape(f"{linear}.{suffix}")
            if stored is not None:
                host = torch.device("cpu")  # where the formats unpack
                found[suffix] = self._store.read(f"{linear}.{suffix}", stored, init, host)
        try:
            return self._format.dequantize_linear(found)
        except KeyError as error:
            raise ModelLoadError(f"the checkpoint lacks {linear}.{error.args[0]}") from error

    def close(self) -> None:
        """See :class:`worker.execution.weights.TensorStore`."""
        self._store.close()
