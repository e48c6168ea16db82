"""The events of a request at its worker, as the HTTP layer reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from serve_app.deployments.protocol import Refused
from serve_app.deployments.watching import StreamWatch
from worker.api import TokenEvent


class PlacedStream:
    """The events of a placed request, the first of which is at hand. Closing it, at any time, aborts the request there
    and calls ``on_end`` once, with the last event so far and the latest timeline."""

    def __init__(self, stream: StreamWatch, first: TokenEvent, on_end: Callable[[TokenEvent], None]) -> None:
        self._stream = stream
        self._on_end = on_end
        self._next: TokenEvent | None = first
        self._last = first
        self._timeline = first.timeline
        self._closed = False

    def __aiter__(self) -> PlacedStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._next is not None:
            event, self._next = self._next, None
            return event
        if self._closed or self._last.finish_reason is not None:
            await self.aclose()
            raise StopAsyncIteration
        try:
            item = await self._stream.next()
        except BaseException:
            await self.aclose()
            raise
        if not isinstance(item, TokenEvent):
            await self.aclose()
            assert isinstance(item, Refused)
            raise item.error
        self._last = item
        self._timeline = item.timeline or self._timeline
        return item

    async def aclose(self) -> None:
        """Ends the request and its booking; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._on_end(replace(self._last, timeline=self._timeline))
        await self._stream.aclose()
