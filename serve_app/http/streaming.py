"""Server-sent events: a stream of JSON chunks as ``data:`` lines, with a clean end whatever happens."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from json.encoder import encode_basestring
from typing import Any, cast

from fastapi.responses import StreamingResponse

from serve_app.http.errors import describe_error

logger = logging.getLogger(__name__)

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = "data: [DONE]\n\n"


def encode_event(chunk: Mapping[str, Any], event: str | None = None) -> str:
    """One event; ``event`` names it, for the APIs that do."""
    data = _on_one_line(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
    return f"event: {event}\ndata: {data}\n\n" if event else f"data: {data}\n\n"


def _on_one_line(data: str) -> str:
    """U+2028, U+2029 and U+0085 are line ends to some readers of event streams; JSON may escape them."""
    if data.isascii():
        return data
    return data.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\u0085", "\\u0085")


class EventTemplate:
    """Events that are alike but for one string; encoding the rest of them anew each time would cost more than all else.

    ``chunk`` has that string, empty, under the key ``field``, and no other empty string under a key of that name.
    """

    def __init__(self, chunk: Mapping[str, Any], field: str) -> None:
        # Inside a JSON string the quotes would be escaped: this can only be the key and its value.
        before, key, after = encode_event(chunk).partition(f'"{field}":""')
        if not key:
            raise ValueError(f"{field!r} is not an empty string")
        self._before = f'{before}"{field}":'
        self._after = after

    def fill(self, text: str) -> str:
        """The event with ``text``."""
        return self._before + _on_one_line(encode_basestring(text)) + self._after


Chunk = Mapping[str, Any] | str
"""Of a stream: a chunk, or one that is encoded already."""


async def start_stream(
    chunks: AsyncIterator[Chunk], headers: Mapping[str, str], *, named: bool = False
) -> StreamingResponse:
    """The response of a streamed request. ``named``: each chunk's ``type`` is the name of its event, and the last
    one is the end; else ``[DONE]`` is.

    The first chunk is awaited here, so that an error before it still gets its own status. A later error becomes a
    last event in the shape of an error body.
    """
    first = await anext(chunks)
    return StreamingResponse(
        _lines(first, chunks, named), media_type="text/event-stream", headers={**_HEADERS, **headers}
    )


def _line(chunk: Chunk, named: bool) -> str:
    if isinstance(chunk, str):
        return chunk
    return encode_event(chunk, chunk["type"] if named else None)


async def _lines(first: Chunk, chunks: AsyncIterator[Chunk], named: bool) -> AsyncIterator[str]:
    async with aclosing(cast("Any", chunks)):
        yield _line(first, named)
        try:
            async for chunk in chunks:
                yield _line(chunk, named)
        except Exception as error:
            answer = describe_error(error)
            if answer.status == 500:
                logger.exception("a stream broke")
            yield encode_event(answer.body(), "error" if named else None)
        if not named:
            yield _DONE
