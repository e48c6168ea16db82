"""Calls as XML (Qwen3.5, Qwen3-Coder): ``<function=NAME>`` with a ``<parameter=KEY>`` for each argument."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from serve_app.text.chat_formats import marked_calls, reasoning
from serve_app.text.chat_formats.base import Tool, arguments_schema, lark_schema, lark_text
from serve_app.text.chat_formats.chatml_json import call_lead
from serve_app.text.chat_formats.plain import json_behind_reasoning, kept
from serve_app.text.tokenizer import TextModel
from worker.api import Grammar

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_END = "</function>"


class XmlCall:
    """One call. Arguments are given on parameter by parameter, as the pieces of a JSON object."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._text = ""
        self._name: str | None = None
        self._num_parameters = 0
        self._ended = False

    def push(self, text: str) -> tuple[str | None, str]:
        """More text of the call."""
        self._text += text
        found: str | None = None
        if self._name is None:
            head = _FUNCTION.match(self._text)
            if head is None:
                return None, ""
            self._name = found = head.group(1).strip()
            self._text = self._text[head.end() :]
        return found, self._parameters()

    def finish(self) -> tuple[str | None, str] | None:
        """The call is over; one that was cut off loses its unfinished parameter."""
        if self._name is None:
            return None
        if self._ended:
            return None, ""
        self._ended = True
        return None, "{}" if not self._num_parameters else "}"

    def _parameters(self) -> str:
        arguments = ""
        while not self._ended:
            parameter = _PARAMETER.match(self._text)
            if parameter is None:
                if self._text.lstrip().startswith(_END):
                    arguments += "}" if self._num_parameters else "{}"
                    self._ended = True
                break
            self._text = self._text[parameter.end() :]
            key, value = parameter.group(1).strip(), _stripped(parameter.group(2))
            lead = ", " if self._num_parameters else "{"
            self._num_parameters += 1
            arguments += f"{lead}{json.dumps(key, ensure_ascii=False)}: {self._as_json(key, value)}"
        return arguments

    def _as_json(self, key: str, value: str) -> str:
        """The value as its parameter's type says: text, or JSON; what is no JSON is text after all."""
        tool = self._tools.get(self._name or "")
        properties = tool.parameters.get("properties", {}) if tool is not None else {}
        schema = properties.get(key, {}) if isinstance(properties, dict) else {}
        if not is_text(schema):
            try:
                return json.dumps(json.loads(value), ensure_ascii=False)
            except ValueError:
                pass
        return json.dumps(value, ensure_ascii=False)


class Qwen3XmlFormat:
    """``<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>``."""

    name = "qwen3_xml"

    def fits(self, template: str) -> bool:
        """Whether the template writes such calls."""
        return "<function=" in template

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As they are."""
        return [dict(message) for message in messages]

    def keep_special(self, text: TextModel) -> frozenset[int]:
        """The marks, where they are special tokens."""
        return kept(text, (reasoning.OPEN, reasoning.CLOSE, marked_calls.OPEN, marked_calls.CLOSE))

    def parser(self, prompt: str, tools: Sequence[Tool]) -> marked_calls.MarkedCallsParser:
        """A parser for one answer."""
        make: Callable[[], XmlCall] | None = (
            partial(XmlCall, {tool.name: tool for tool in tools}) if tools else None
        )
        return marked_calls.MarkedCallsParser(reasoning.begins_inside(prompt), make)

    def tool_grammar(self, text: TextModel, prompt: str, tools: Sequence[Tool], parallel: bool) -> Grammar:
        """One or more calls. Required parameters come first, in the schema's order, then any of the others."""
        opened, closed = lark_text(text, marked_calls.OPEN), lark_text(text, marked_calls.CLOSE)
        rules = [f"start: {call_lead(text, prompt)}call" + (' ("\\n" call)*' if parallel else "")]
        rules.append("call: " + " | ".join(f"call{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            rules += _call_rules(index, tool, opened, closed)
        return Grammar("lark", "\n".join(rules) + "\n", reasoning.end_token(text, prompt))

    def json_grammar(self, text: TextModel, prompt: str, schema: Mapping[str, Any]) -> Grammar:
        """JSON behind the reasoning."""
        return json_behind_reasoning(text, prompt, schema)


def is_text(schema: Any) -> bool:
    """Whether a parameter is plain text by its schema; then its value stands in the call as it is."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _call_rules(index: int, tool: Tool, opened: str, closed: str) -> list[str]:
    schema = arguments_schema(tool)
    properties = schema.get("properties") or {}
    required = [name for name in schema.get("required") or [] if name in properties]
    names = [*required, *(name for name in properties if name not in required)]
    head = json.dumps(f"\n<function={tool.name}>\n")
    uses = [f"p{index}_{place}" + ("" if name in required else "?") for place, name in enumerate(names)]
    rules = [f'call{index}: {opened} {head} {" ".join(uses)} "</function>\\n" {closed}']
    for place, name in enumerate(names):
        rule = f"p{index}_{place}"
        start = json.dumps(f"<parameter={name}>\n", ensure_ascii=False)
        rules.append(f"{rule}: {start} {rule}_value")
        rules += _value_rules(f"{rule}_value", properties[name])
    return rules


def _value_rules(rule: str, schema: Any) -> list[str]:
    """Rules of one value and the mark behind it."""
    end = '"\\n</parameter>\\n"'
    if not is_text(schema):
        return [
            f"{rule}: {rule}_json {end}",
            f"{rule}_json: {lark_schema(schema if isinstance(schema, dict) else {})}",
        ]
    choices = schema.get("enum")
    if choices and all(isinstance(choice, str) for choice in choices):
        return [f"{rule}: ({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}) {end}"]
    longest = schema.get("maxLength")
    times = f"{{0,{longest}}}" if isinstance(longest, int) else "*"
    # Lazy: the first such mark ends the value.
    return [f"{rule}[suffix={end}]: /(.|\\n){times}/"]


def _stripped(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")
