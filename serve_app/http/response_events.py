"""Builds a ``/v1/responses`` answer item by item, as events and as the body they add up to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.http.turn import TurnReader
from serve_app.text.chat_formats.base import ChatDelta

Event = dict[str, Any]


class ResponseBuilder:
    """One answer. Items open when their first piece comes and close when another kind of piece or the end does."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._head = {"id": _new_id("resp"), "object": "response", "created_at": int(time.time()), **settings}
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._sequence = 0

    def body(self, status: str, usage: Mapping[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
        """The response object as it stands."""
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [dict(item) for item in self._items],
            "usage": usage,
        }

    def begin(self) -> Iterator[Event]:
        """The events ahead of all items."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.body("in_progress", None))

    def add(self, said: ChatDelta, reader: TurnReader) -> Iterator[Event]:
        """The events of one delta: reasoning, then text, then calls."""
        if said.reasoning:
            yield from self._text("reasoning", said.reasoning)
        if said.content:
            yield from self._text("message", said.content)
        for tool in said.tools:
            if tool.name is not None:
                yield from self._close()
                item = {"type": "function_call", "call_id": reader.call_id(tool.index), "name": tool.name}
                yield from self._open_item("fc", {**item, "arguments": ""})
            if tool.arguments:
                yield self._grow(tool.arguments)

    def end(self, usage: Mapping[str, Any], finish_reason: str | None) -> Iterator[Event]:
        """The events of the end."""
        yield from self._close()
        if finish_reason == "length":
            body = self.body("incomplete", usage, "max_output_tokens")
            yield self._event("response.incomplete", response=body)
        else:
            yield self._event("response.completed", response=self.body("completed", usage))

    def fail(self, code: str, message: str) -> Event:
        """The last event of an answer that broke."""
        body = {**self.body("failed", None), "error": {"code": code, "message": message}}
        return self._event("response.failed", response=body)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            if kind == "message":
                yield from self._open_item("msg", {"type": "message", "role": "assistant", "content": []})
            else:
                yield from self._open_item("rs", {"type": "reasoning", "summary": [], "content": []})
        yield self._grow(text)

    def _open_item(self, prefix: str, item: dict[str, Any]) -> Iterator[Event]:
        item = {"id": _new_id(prefix), **item, "status": "in_progress"}
        self._open = opened = _OpenItem(item["type"], len(self._items), item)
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=opened.index, item=dict(item))
        if opened.part is not None:
            yield self._event("response.content_part.added", **opened.where, part=dict(opened.part))

    def _grow(self, piece: str) -> Event:
        opened = self._open
        assert opened is not None
        opened.text += piece
        more: dict[str, Any] = {"logprobs": []} if opened.kind == "message" else {}
        return self._event(f"{opened.stem}.delta", **opened.where, delta=piece, **more)

    def _close(self) -> Iterator[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return
        item = opened.item
        item["status"] = "completed"
        if opened.part is None:
            item["arguments"] = opened.text
            name = {"name": item["name"]}
            yield self._event(f"{opened.stem}.done", **opened.where, arguments=opened.text, **name)
        else:
            opened.part["text"] = opened.text
            item["content"] = [opened.part]
            more: dict[str, Any] = {"logprobs": []} if opened.kind == "message" else {}
            yield self._event(f"{opened.stem}.done", **opened.where, text=opened.text, **more)
            yield self._event("response.content_part.done", **opened.where, part=dict(opened.part))
        yield self._event("response.output_item.done", output_index=opened.index, item=dict(item))

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


class _OpenItem:
    """The item that grows now. ``part``: its one content part; None for calls."""

    def __init__(self, kind: str, index: int, item: dict[str, Any]) -> None:
        self.kind = kind
        self.index = index
        self.item = item
        self.text = ""
        self.part: dict[str, Any] | None = None
        self.where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if kind == "function_call":
            self.stem = "response.function_call_arguments"
            return
        self.where["content_index"] = 0
        if kind == "message":
            self.stem = "response.output_text"
            self.part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            self.stem = "response.reasoning_text"
            self.part = {"type": "reasoning_text", "text": ""}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
