"""Reads one answer of a chat: its text, reasoning and calls, and why it ended."""

from __future__ import annotations

import uuid

from serve_app.text.chat_formats.base import AnswerParser, ChatDelta
from serve_app.text.output import OutputPiece
from serve_app.text.tokenizer import TextModel


class TurnReader:
    """Feeds an answer's pieces to its format's parser and gives its calls ids."""

    def __init__(self, parser: AnswerParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self._ids: dict[int, str] = {}
        self._reasoning: list[str] = []

    def read(self, piece: OutputPiece) -> tuple[ChatDelta, str | None]:
        """What the piece adds, and the finish reason with the last one."""
        delta = self._parser.push(piece.text) if piece.text else ChatDelta()
        if piece.finish_reason is not None:
            delta += self._parser.finish()
        if not self._parallel:
            # The format let more than one call pass; the client takes one.
            first = tuple(tool for tool in delta.tools if tool.index == 0)
            delta = ChatDelta(delta.content, delta.reasoning, first)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for tool in delta.tools:
            self._ids.setdefault(tool.index, f"call_{uuid.uuid4().hex[:24]}")
        reason = piece.finish_reason
        return delta, "tool_calls" if reason == "stop" and self._ids else reason

    def num_reasoning_tokens(self, text: TextModel) -> int:
        """Tokens of the reasoning so far: of its text, as what the model wrote came in pieces that mix both."""
        return len(text.encode("".join(self._reasoning)))

    def call_id(self, index: int) -> str:
        """The id of a call that was read."""
        return self._ids[index]
