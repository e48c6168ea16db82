"""Says when a launched step is done and how long the device worked on it."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Runs from its making to :meth:`stop`. On a GPU both ends are events in the stream: the time between them is the
    device's, and waiting for the second one waits for nothing that was launched later."""

    def __init__(self, device: torch.device) -> None:
        self._started_s = time.perf_counter()
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()

    def stop(self) -> None:
        """Everything of the step was launched."""
        if self._events is not None:
            self._events[1].record()
        else:
            self._seconds = time.perf_counter() - self._started_s

    def wait(self) -> float:
        """Waits for the step's end; answers its seconds."""
        if self._events is None:
            return self._seconds
        first, last = self._events
        last.synchronize()
        return first.elapsed_time(last) / 1e3
