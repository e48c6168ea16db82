"""Carries a step's host values to the device in one copy, and its results back, without making either side wait."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Value = TypeVar("Value")

ALIGN_BYTES = 256
RING = 5
"""Host buffers in turn: one being filled, those of the steps in flight, and of a pass that begins or ends meanwhile."""
FIRST_BYTES = 1 << 20


class Uploads(Protocol):
    """Where a step's arrays become device tensors. What ``put`` answers may be read by kernels launched behind the
    next ``flush``, until the ``begin`` of the next step."""

    def begin(self) -> None:
        """Opens a step."""
        ...

    def put(self, values: Array) -> torch.Tensor:
        """The array as a tensor on the device, same shape and dtype."""
        ...

    def flush(self) -> None:
        """Sends what was put since the last flush."""
        ...


class HostUploads:
    """For a CPU: the tensors share the arrays' memory."""

    def begin(self) -> None:
        """Nothing to do."""

    def put(self, values: Array) -> torch.Tensor:
        """The array itself."""
        return torch.from_numpy(np.ascontiguousarray(values))

    def flush(self) -> None:
        """Nothing to do."""


class PinnedUploads:
    """For a GPU: arrays are laid one behind the other into a pinned buffer, and cross in one asynchronous copy.

    The device side is one buffer: a step's copy stands behind the kernels of the step before in the stream, so none is
    overwritten while it is read. The host side is a ring, each buffer guarded by the event of its last copy.
    """

    def __init__(self, device: torch.device, num_bytes: int = FIRST_BYTES) -> None:
        """``num_bytes``: of a buffer at first; it grows when a step needs more."""
        self._device = device
        self._events = [torch.cuda.Event() for _ in range(RING)]
        self._turn = 0
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
        self._views: list[npt.NDArray[np.uint8]] = [host.numpy() for host in self._hosts]
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._used = self._sent = 0

    def begin(self) -> None:
        """Takes the next buffer of the ring, once the copy that last read it is done."""
        self._turn = (self._turn + 1) % RING
        self._events[self._turn].synchronize()
        self._used = self._sent = 0

    def put(self, values: Array) -> torch.Tensor:
        """See :class:`Uploads`."""
        size = values.nbytes
        if self._used + size > self._num_bytes:
            self.flush()
            # Kernels launched before keep the old buffers alive through their tensors.
            self._allocate(2 * max(self._num_bytes, size))
        first = self._used
        self._used = -(-(first + size) // ALIGN_BYTES) * ALIGN_BYTES
        place = self._views[self._turn][first : first + size]
        place.view(values.dtype).reshape(values.shape)[...] = values
        dtype: torch.dtype = getattr(torch, values.dtype.name)
        return self._target[first : first + size].view(dtype).view(values.shape)

    def flush(self) -> None:
        """See :class:`Uploads`."""
        if self._used > self._sent:
            span = slice(self._sent, min(self._used, self._num_bytes))
            self._target[span].copy_(self._hosts[self._turn][span], non_blocking=True)
            self._events[self._turn].record()
            self._sent = self._used


def make_uploads(device: torch.device) -> PinnedUploads | HostUploads:
    """What suits the device."""
    return PinnedUploads(device) if device.type == "cuda" else HostUploads()


def put_fields(value: Value, uploads: Uploads) -> Value:
    """A dataclass of host tensors and plain values with each tensor put on the device."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} is not a dataclass value")
    tensors = {
        entry.name: uploads.put(held.numpy())
        for entry in fields(value)
        if isinstance(held := getattr(value, entry.name), torch.Tensor)
    }
    found: Value = replace(value, **tensors)
    return found


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a device tensor in host memory that is whole when an event recorded behind this call is done; a CPU's
    tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
