"""Where copies run beside the steps: on streams of their own, ordered by events; at once where there is no GPU.

The *compute stream* is whichever is current when a step is launched. A lane's work starts behind the marks it is given,
and the compute stream goes on only behind a mark where it is told to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch


class Lane(Enum):
    """What a stream beside the steps carries. Both directions of the link are used at once."""

    MOVE = "move"
    TO_HOST = "to_host"
    FROM_HOST = "from_host"


class Mark(Protocol):
    """A moment in a stream: everything launched there before it."""

    def is_done(self) -> bool:
        """Whether the device has passed it; never waits."""
        ...


class Lanes(Protocol):
    """Streams beside the compute stream."""

    def mark(self) -> Mark:
        """This moment of the compute stream."""
        ...

    def run(self, lane: Lane, behind: Sequence[Mark], work: Callable[[], None]) -> Mark:
        """Starts ``work`` in a lane, behind ``behind`` and what the lane was given before; answers its end."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Starts ``work`` on the compute stream."""
        ...

    def wait(self, mark: Mark) -> None:
        """Work launched on the compute stream from now on starts behind ``mark``."""
        ...

    def finish(self, mark: Mark) -> None:
        """The host waits until the device has passed ``mark``."""
        ...


class _Passed:
    def is_done(self) -> bool:
        return True


class HostLanes:
    """For a CPU: everything has happened when the call returns."""

    def mark(self) -> Mark:
        """See :class:`Lanes`."""
        return _Passed()

    def run(self, lane: Lane, behind: Sequence[Mark], work: Callable[[], None]) -> Mark:
        """See :class:`Lanes`."""
        work()
        return _Passed()

    def compute(self, work: Callable[[], None]) -> None:
        """See :class:`Lanes`."""
        work()

    def wait(self, mark: Mark) -> None:
        """See :class:`Lanes`."""

    def finish(self, mark: Mark) -> None:
        """See :class:`Lanes`."""


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return self.event.query()


class CudaLanes:
    """For a GPU: a stream per lane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in Lane}

    def mark(self) -> Mark:
        """See :class:`Lanes`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _EventMark(event)

    def run(self, lane: Lane, behind: Sequence[Mark], work: Callable[[], None]) -> Mark:
        """See :class:`Lanes`."""
        stream = self._streams[lane]
        for mark in behind:
            stream.wait_event(_event(mark))
        with torch.cuda.stream(stream):
            work()
            event = torch.cuda.Event()
            event.record(stream)
        return _EventMark(event)

    def compute(self, work: Callable[[], None]) -> None:
        """See :class:`Lanes`."""
        work()

    def finish(self, mark: Mark) -> None:
        """See :class:`Lanes`."""
        _event(mark).synchronize()

    def wait(self, mark: Mark) -> None:
        """See :class:`Lanes`."""
        torch.cuda.current_stream(self._device).wait_event(_event(mark))


def _event(mark: Mark) -> torch.cuda.Event:
    if not isinstance(mark, _EventMark):
        raise TypeError(f"a mark of other lanes: {mark!r}")
    return mark.event


def make_lanes(device: torch.device) -> Lanes:
    """What suits the device."""
    return CudaLanes(device) if device.type == "cuda" else HostLanes()
