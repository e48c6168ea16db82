"""ChatML with calls as JSON (Qwen3, Hermes, and the model that comes with Headroom)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.text.chat_formats import marked_calls, reasoning
from serve_app.text.chat_formats.base import Tool, arguments_schema, lark_schema, lark_text
from serve_app.text.chat_formats.call_json import CallReader
from serve_app.text.chat_formats.plain import json_behind_reasoning, kept
from serve_app.text.tokenizer import TextModel
from worker.api import Grammar


class JsonCall:
    """One call."""

    def __init__(self) -> None:
        self._reader = CallReader()

    def push(self, text: str) -> tuple[str | None, str]:
        """More text of the call."""
        before = self._reader.name
        arguments = self._reader.push(text)
        return (self._reader.name if before is None else None), arguments

    def finish(self) -> tuple[str | None, str] | None:
        """The call is over."""
        before = self._reader.name
        arguments = self._reader.finish()
        if arguments is None:
            return None
        return (self._reader.name if before is None else None), arguments


class ChatmlJsonFormat:
    """``<think> .. </think>``, text, ``<tool_call>\\n{"name": .., "arguments": ..}\\n</tool_call>``."""

    name = "chatml_json"

    def fits(self, template: str) -> bool:
        """Whether the template writes such calls."""
        return marked_calls.OPEN in template

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As they are."""
        return [dict(message) for message in messages]

    def keep_special(self, text: TextModel) -> frozenset[int]:
        """The marks, where they are special tokens."""
        return kept(text, (reasoning.OPEN, reasoning.CLOSE, marked_calls.OPEN, marked_calls.CLOSE))

    def parser(self, prompt: str, tools: Sequence[Tool]) -> marked_calls.MarkedCallsParser:
        """A parser for one answer."""
        return marked_calls.MarkedCallsParser(reasoning.begins_inside(prompt), JsonCall if tools else None)

    def tool_grammar(self, text: TextModel, prompt: str, tools: Sequence[Tool], parallel: bool) -> Grammar:
        """One or more calls, nothing else, behind a reasoning that the prompt has opened."""
        opened, closed = lark_text(text, marked_calls.OPEN), lark_text(text, marked_calls.CLOSE)
        rules = [f"start: {call_lead(text, prompt)}call" + (' ("\\n" call)*' if parallel else "")]
        rules.append("call: " + " | ".join(f"call{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            head = json.dumps('\n{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": ')
            rules.append(f'call{index}: {opened} {head} arguments{index} "}}\\n" {closed}')
            rules.append(f"arguments{index}: {lark_schema(arguments_schema(tool))}")
        return Grammar("lark", "\n".join(rules) + "\n", reasoning.end_token(text, prompt))

    def json_grammar(self, text: TextModel, prompt: str, schema: Mapping[str, Any]) -> Grammar:
        """JSON behind the reasoning."""
        return json_behind_reasoning(text, prompt, schema)


def call_lead(text: TextModel, prompt: str) -> str:
    """What may stand before the first call: the line ends behind a reasoning."""
    return "" if reasoning.end_token(text, prompt) is None else "/\\n{0,2}/ "
