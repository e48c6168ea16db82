"""What a chat format is: it prepares conversations, reads answers as they grow, and can hold them to tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_app.text.tokenizer import TextModel
from worker.api import Grammar

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; ``parameters`` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of the ``index``-th call of an answer. ``name`` comes once, in its first piece; ``arguments`` are
    pieces of a JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What an answer grew by."""

    content: str = ""
    reasoning: str = ""
    tools: tuple[ToolDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tools)

    def __add__(self, later: ChatDelta) -> ChatDelta:
        return ChatDelta(
            self.content + later.content,
            self.reasoning + later.reasoning,
            merged_tools(self.tools + later.tools),
        )


class AnswerParser(Protocol):
    """Reads one answer. The sum of all deltas is the same however the text is split."""

    def push(self, text: str) -> ChatDelta:
        """More text."""
        ...

    def finish(self) -> ChatDelta:
        """The text is over: what was held back."""
        ...


class ChatFormat(Protocol):
    """A family's way to write. Formats have no state; parsers do."""

    name: str

    def fits(self, template: str) -> bool:
        """Whether a chat template is of this family."""
        ...

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with the names that the family's templates use."""
        ...

    def keep_special(self, text: TextModel) -> frozenset[int]:
        """Special tokens that the parser must see."""
        ...

    def parser(self, prompt: str, tools: Sequence[Tool]) -> AnswerParser:
        """A parser for an answer to ``prompt``. Without tools, marks of calls are text."""
        ...

    def tool_grammar(self, text: TextModel, prompt: str, tools: Sequence[Tool], parallel: bool) -> Grammar:
        """Holds the answer to one call of one of ``tools``, or several with ``parallel``."""
        ...

    def json_grammar(self, text: TextModel, prompt: str, schema: Mapping[str, Any]) -> Grammar:
        """Holds the answer, behind its reasoning, to a JSON value of a schema."""
        ...


def merged_tools(deltas: Sequence[ToolDelta]) -> tuple[ToolDelta, ...]:
    """Neighbouring pieces of the same call as one."""
    merged: list[ToolDelta] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index and delta.name is None:
            last = merged[-1]
            merged[-1] = ToolDelta(last.index, last.name, last.arguments + delta.arguments)
        else:
            merged.append(delta)
    return tuple(merged)


def possible_mark(text: str, marks: Collection[str]) -> int:
    """Length of the longest end of ``text`` that one of the marks begins with (and that is not all of it)."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


def first_mark(text: str, marks: Collection[str]) -> tuple[int, str] | None:
    """Where the first of the marks is in ``text``, the longer one where two begin at the same place."""
    hits = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    if not hits:
        return None
    at, _, mark = min(hits)
    return at, mark


def lark_text(text: TextModel, literal: str) -> str:
    """A literal for a Lark grammar; a mark that is one token of the vocabulary is asked for as that token."""
    if literal.startswith("<") and literal.endswith(">") and text.tokenizer.token_to_id(literal) is not None:
        return literal
    return json.dumps(literal, ensure_ascii=False)


def lark_schema(schema: Mapping[str, Any]) -> str:
    """A JSON value of a schema, for a Lark grammar, in the compact form that models write."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT}, ensure_ascii=False)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: at least an object."""
    return {"type": "object", **tool.parameters}
