"""Models without marks for tool calls: text, and reasoning where they write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.text.chat_formats import reasoning
from serve_app.text.chat_formats.base import ChatDelta, Tool, lark_schema
from serve_app.text.tokenizer import TextModel
from worker.api import Grammar
from worker.errors import InvalidRequest


class PlainParser:
    """Splits off the reasoning."""

    def __init__(self, inside: bool) -> None:
        self._splitter = reasoning.ReasoningSplitter(inside)

    def push(self, text: str) -> ChatDelta:
        """More text."""
        thought, said = self._splitter.push(text)
        return ChatDelta(said, thought)

    def finish(self) -> ChatDelta:
        """The text is over."""
        thought, said = self._splitter.finish()
        return ChatDelta(said, thought)


class PlainFormat:
    """No tools."""

    name = "plain"

    def fits(self, template: str) -> bool:
        """Fits every template."""
        return True

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As they are."""
        return [dict(message) for message in messages]

    def keep_special(self, text: TextModel) -> frozenset[int]:
        """The marks of reasoning, where they are special tokens."""
        return kept(text, (reasoning.OPEN, reasoning.CLOSE))

    def parser(self, prompt: str, tools: Sequence[Tool]) -> PlainParser:
        """A parser for one answer."""
        return PlainParser(reasoning.begins_inside(prompt))

    def tool_grammar(self, text: TextModel, prompt: str, tools: Sequence[Tool], parallel: bool) -> Grammar:
        """There is no way to write a call."""
        raise InvalidRequest(
            "tools", "The model's chat template knows no tools; send the request without them."
        )

    def json_grammar(self, text: TextModel, prompt: str, schema: Mapping[str, Any]) -> Grammar:
        """JSON behind the reasoning."""
        return json_behind_reasoning(text, prompt, schema)


def kept(text: TextModel, marks: Sequence[str]) -> frozenset[int]:
    """Ids of those marks that are special tokens of the vocabulary."""
    ids = {text.tokenizer.token_to_id(mark) for mark in marks}
    return frozenset(token_id for token_id in ids if token_id in text.special_ids)


def json_behind_reasoning(text: TextModel, prompt: str, schema: Mapping[str, Any]) -> Grammar:
    """A JSON value; when the prompt has opened the reasoning, behind its end and the line ends there."""
    after = reasoning.end_token(text, prompt)
    if after is None:
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
    return Grammar("lark", f"start: /\\n{{0,2}}/ value\nvalue: {lark_schema(schema)}\n", after)
