"""Server-sent events: a stream of JSON chunks as ``data:`` lines, with a clean end whatever happens."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

from fastapi.responses import StreamingResponse

from serve_app.http.errors import describe_error

logger = logging.getLogger(__name__)

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = "data: [DONE]\n\n"


def encode_event(chunk: Mapping[str, Any], event: str | None = None) -> str:
    """One event; ``event`` names it, for the APIs that do."""
    data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    # U+2028, U+2029 and U+0085 are line ends to some readers of event streams; JSON may escape them.
    data = data.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\u0085", "\\u0085")
    return f"event: {event}\ndata: {data}\n\n" if event else f"data: {data}\n\n"


async def start_stream(
    chunks: AsyncIterator[Mapping[str, Any]], headers: Mapping[str, str], *, named: bool = False
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


async def _lines(
    first: Mapping[str, Any], chunks: AsyncIterator[Mapping[str, Any]], named: bool
) -> AsyncIterator[str]:
    async with aclosing(cast("Any", chunks)):
        yield encode_event(first, first["type"] if named else None)
        try:
            async for chunk in chunks:
                yield encode_event(chunk, chunk["type"] if named else None)
        except Exception as error:
            answer = describe_error(error)
            if answer.status == 500:
                logger.exception("a stream broke")
            yield encode_event(answer.body(), "error" if named else None)
        if not named:
            yield _DONE
