"""A prefill that stops at layer boundaries, so that decode steps run in between."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch

from worker.execution.batch import DeviceBatch
from worker.experts.pager import ExpertPager
from worker.experts.pass_ring import PassRing
from worker.layers.decoder import Decoder

MOST_OVER = 1.1
"""A slice may take a tenth more than its time to make up for shorter ones, no more: streams wait for it."""


class LayerPace:
    """How many layers take about so many seconds, by those that ran, in this pass and the ones before, and by what the
    link brings. On a GPU it is told by events of an earlier slice, without waiting; until something is known, one layer
    is taken at a time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._layer_s = 0.0
        self._num_tokens = 0
        self._left = 0.0  # of a layer: what the slices before had more or less than their time
        self._slice: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None

    def begin_pass(self, num_tokens: int, fill_s: float = 0.0) -> None:
        """A pass of so many tokens begins. More tokens are taken to need as much more; fewer to need the same, for it
        may have been the link that took the time. ``fill_s``: seconds until the link has brought a layer's experts,
        which no layer is faster than for long."""
        if self._num_tokens:
            self._layer_s *= max(1.0, num_tokens / self._num_tokens)
        self._layer_s = max(self._layer_s, fill_s)
        self._num_tokens = num_tokens
        self._slice = None
        self._left = 0.0

    def layers(self, seconds: float) -> int:
        """Layers for ``seconds``, at least one. Fractions are carried over: slices take their time on average, and none
        takes more than :data:`MOST_OVER` times it."""
        if self._slice is not None and self._slice[1].query():
            first, last, count = self._slice
            self._layer_s = first.elapsed_time(last) / 1e3 / count
            self._slice = None
        if not self._layer_s:
            return 1
        exact = seconds / self._layer_s + self._left
        most = int(MOST_OVER * seconds / self._layer_s)
        count = max(1, min(int(exact), most))
        self._left = min(1.0, max(-1.0, exact - count))
        return count

    def begin(self) -> tuple[float, torch.cuda.Event | None]:
        """A slice begins."""
        if not self._on_gpu:
            return time.perf_counter(), None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return 0.0, event

    def end(self, began: tuple[float, torch.cuda.Event | None], count: int) -> None:
        """A slice of ``count`` layers was launched; on a CPU: computed."""
        started_s, first = began
        if first is None:
            self._layer_s = (time.perf_counter() - started_s) / count
        elif self._slice is None:
            last = torch.cuda.Event(enable_timing=True)
            last.record()
            self._slice = (first, last, count)


class PrefillPass:
    """The layers of one pass, behind its memory commands. Its batch's tensors are its own."""

    def __init__(
        self,
        decoder: Decoder,
        batch: DeviceBatch,
        pager: ExpertPager | None,
        ring: PassRing | None,
        pace: LayerPace,
    ) -> None:
        """``pace``: known from passes before."""
        self.batch = batch
        self._decoder = decoder
        self._pager = pager
        self._ring = ring
        self._rotation = decoder.rotation(batch.context.positions)
        self._stream, self._normed = decoder.enter(batch.token_ids)
        self._pace = pace
        self._next = 0
        pace.begin_pass(len(batch.token_ids), ring.fill_s if ring is not None else 0.0)

    @property
    def is_done(self) -> bool:
        """Whether all layers were launched."""
        return self._next == self._decoder.num_layers

    @property
    def hidden(self) -> torch.Tensor:
        """[tokens, H] behind the final norm; RuntimeError before the last layer."""
        if not self.is_done:
            raise RuntimeError(f"the pass stands at layer {self._next} of {self._decoder.num_layers}")
        return self._normed

    def advance(self, seconds: float | None) -> None:
        """Launches further layers: about ``seconds`` of them, at least one; None: all that are left."""
        left = self._decoder.num_layers - self._next
        count = left if seconds is None else min(left, self._pace.layers(seconds))
        if not count:
            return
        began = self._pace.begin()
        with nullcontext() if self._pager is None or self._ring is None else self._pager.passing(self._ring):
            for number in range(self._next, self._next + count):
                self._normed = self._decoder.advance(
                    number, self._stream, self._normed, self._rotation, self.batch.context
                )
        self._next += count
        self._pace.end(began, count)
