"""Carries each step's page numbers to the device: a ring of pinned buffers, one asynchronous copy a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from memory.device.lanes import Lanes, Mark

IntArray = npt.NDArray[np.int64]
NUM_SLOTS = 4
"""One being filled, those of two steps in flight, and one for a lane that is late."""
FIRST_WORDS = 1 << 14


class _Slot:
    """A buffer on each side, and what may still use them: the copy between them, and readers beside the steps."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.empty(num_words, dtype=torch.int64, pin_memory=pinned)
        self.words: IntArray = self.host.numpy()
        self.device = torch.empty(num_words, dtype=torch.int64, device=device)
        self.sent: Mark | None = None
        self.readers: list[Mark] = []


class IndexRing:
    """The host fills a buffer that no copy in flight reads, so a step in flight never sees a later step's numbers."""

    def __init__(self, device: torch.device, num_words: int = FIRST_WORDS) -> None:
        """``num_words``: of a buffer at first; it grows when a step needs more."""
        self._device = device
        self._slots = [_Slot(num_words, device) for _ in range(NUM_SLOTS)]
        self._turn = 0

    def send(self, arrays: Sequence[IntArray], lanes: Lanes) -> list[torch.Tensor]:
        """The arrays [n] as device tensors, for kernels launched from now on on the compute stream, until the ring
        has come round; for work in a lane as long as :meth:`keep` says."""
        self._turn = (self._turn + 1) % NUM_SLOTS
        slot = self._slots[self._turn]
        if slot.sent is not None:
            lanes.finish(slot.sent)  # of four steps ago: done long since
        for mark in slot.readers:
            lanes.wait(mark)
        slot.readers.clear()
        total = sum(map(len, arrays))
        if total > len(slot.words):
            slot = self._slots[self._turn] = _Slot(2 * total, self._device)
        found: list[torch.Tensor] = []
        first = 0
        for array in arrays:
            last = first + len(array)
            slot.words[first:last] = array
            found.append(slot.device[first:last])
            first = last
        target, source = slot.device[:total], slot.host[:total]
        lanes.compute(lambda: _upload(target, source))
        slot.sent = lanes.mark()
        return found

    def keep(self, mark: Mark) -> None:
        """What was sent last is read in a lane until ``mark``."""
        self._slots[self._turn].readers.append(mark)


def _upload(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
