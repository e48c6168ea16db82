"""Harmony (GPT-OSS): messages in channels; analysis is reasoning, commentary to a function is a call, final is text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.text.chat_formats.base import (
    ChatDelta,
    Tool,
    ToolDelta,
    arguments_schema,
    first_mark,
    lark_schema,
    lark_text,
    possible_mark,
)
from serve_app.text.chat_formats.plain import kept
from serve_app.text.tokenizer import TextModel
from worker.api import Grammar

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_BODY_ENDS = (START, END, CALL, RETURN)
_TO_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")


class HarmonyParser:
    """Reads one answer: headers up to ``<|message|>``, then bodies up to a mark that ends them."""

    def __init__(self, with_tools: bool) -> None:
        self._with_tools = with_tools
        self._header: str | None = ""
        self._held = ""
        self._channel = "final"
        self._num_calls = 0

    def push(self, text: str) -> ChatDelta:
        """More text, special tokens written out."""
        self._held += text
        delta = ChatDelta()
        while self._held:
            marks = (MESSAGE,) if self._header is not None else _BODY_ENDS
            hit = first_mark(self._held, marks)
            if hit is None:
                free = len(self._held) - possible_mark(self._held, marks)
                taken, self._held = self._held[:free], self._held[free:]
                return delta + self._take(taken)
            at, mark = hit
            taken, self._held = self._held[:at], self._held[at + len(mark) :]
            delta += self._take(taken)
            if self._header is None:
                self._end_body()
            else:
                delta += self._begin_body()
        return delta

    def finish(self) -> ChatDelta:
        """The text is over. An answer without any marks is text."""
        left, self._held = self._held, ""
        delta = self._take(left)
        if self._header is not None and not any(mark in self._header for mark in (CHANNEL, START)):
            delta += ChatDelta(content=self._header)
        self._header = ""
        return delta

    def _take(self, text: str) -> ChatDelta:
        if not text:
            return ChatDelta()
        if self._header is not None:
            self._header += text
            return ChatDelta()
        if self._channel == "call":
            return ChatDelta(tools=(ToolDelta(self._num_calls, None, text),))
        if self._channel == "analysis":
            return ChatDelta(reasoning=text)
        return ChatDelta(content=text)

    def _begin_body(self) -> ChatDelta:
        header, self._header = self._header or "", None
        function = _TO_FUNCTION.search(header)
        if function is not None and self._with_tools:
            self._channel = "call"
            return ChatDelta(tools=(ToolDelta(self._num_calls, function.group(1), ""),))
        self._channel = "analysis" if f"{CHANNEL}analysis" in header else "final"
        return ChatDelta()

    def _end_body(self) -> None:
        self._header = ""
        if self._channel == "call":
            self._num_calls += 1


class HarmonyFormat:
    """``<|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..<|return|>``."""

    name = "harmony"

    def fits(self, template: str) -> bool:
        """Whether the template writes channels."""
        return CHANNEL in template

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The template calls the reasoning of an earlier turn ``thinking``."""
        renamed = []
        for message in messages:
            plain = dict(message)
            if "reasoning_content" in plain:
                plain["thinking"] = plain.pop("reasoning_content")
            renamed.append(plain)
        return renamed

    def keep_special(self, text: TextModel) -> frozenset[int]:
        """All marks."""
        return kept(text, MARKS)

    def parser(self, prompt: str, tools: Sequence[Tool]) -> HarmonyParser:
        """A parser for one answer; the prompt ends behind ``<|start|>assistant``."""
        return HarmonyParser(bool(tools))

    def tool_grammar(self, text: TextModel, prompt: str, tools: Sequence[Tool], parallel: bool) -> Grammar:
        """An analysis, then one call: the format ends an answer behind its first call."""
        calls = " | ".join(f"call{index}" for index in range(len(tools)))
        rules = [f"start: {_analysis(text)} ({calls})"]
        for index, tool in enumerate(tools):
            to = json.dumps(f"commentary to=functions.{tool.name} ")
            rules.append(
                f"call{index}: {lark_text(text, CHANNEL)} {to} {lark_text(text, CONSTRAIN)} "
                f'"json" {lark_text(text, MESSAGE)} arguments{index}'
            )
            rules.append(f"arguments{index}: {lark_schema(arguments_schema(tool))}")
        return Grammar("lark", "\n".join(rules) + "\n")

    def json_grammar(self, text: TextModel, prompt: str, schema: Mapping[str, Any]) -> Grammar:
        """An analysis, then the value in the final channel."""
        final = f'{lark_text(text, CHANNEL)} "final" {lark_text(text, MESSAGE)}'
        return Grammar("lark", f"start: {_analysis(text)} {final} value\nvalue: {lark_schema(schema)}\n")


def _analysis(text: TextModel) -> str:
    """An optional message in the analysis channel, and the start of the next one."""
    opened = f'{lark_text(text, CHANNEL)} "analysis" {lark_text(text, MESSAGE)}'
    closed = f'{lark_text(text, END)} {lark_text(text, START)} "assistant"'
    return f"({opened} /(.|\\n)*/ {closed})?"
