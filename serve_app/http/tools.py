"""Tools and structured output of a request: what the client asked for, as tools and a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.http.backend import ServedModel
from serve_app.http.schemas import FunctionTool, JsonSchemaFormat, NamedToolChoice, OutputFormat
from serve_app.text.chat_formats.base import Tool
from worker.api import Grammar
from worker.errors import InvalidRequest


@dataclass(frozen=True)
class ToolUse:
    """What an answer may do with tools.

    Attributes:
        described: as the chat template gets them; empty when the model is not to know of any.
        callable: those that it may call.
        must_call: whether the answer has to be a call.
    """

    described: tuple[Mapping[str, Any], ...] = ()
    callable: tuple[Tool, ...] = ()
    must_call: bool = False


def read_tools(tools: Sequence[FunctionTool] | None, choice: str | NamedToolChoice | None) -> ToolUse:
    """Raises InvalidRequest naming ``tools`` or ``tool_choice``."""
    if not tools:
        if choice in (None, "none", "auto"):
            return ToolUse()
        raise InvalidRequest("tool_choice", "tool_choice needs tools.")
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools", "Two tools have the same name.")
    if choice == "none":
        return ToolUse()
    described = tuple(tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools)
    known = tuple(
        Tool(tool.function.name, tool.function.parameters or {}, tool.function.description or "")
        for tool in tools
    )
    if isinstance(choice, NamedToolChoice):
        named = tuple(tool for tool in known if tool.name == choice.function.name)
        if not named:
            raise InvalidRequest("tool_choice", f"There is no tool {choice.function.name!r} in tools.")
        return ToolUse(described, named, must_call=True)
    return ToolUse(described, known, must_call=choice == "required")


def answer_grammar(
    model: ServedModel, prompt: str, use: ToolUse, output: OutputFormat | None, parallel: bool
) -> Grammar | None:
    """What holds the answer to a call or to a JSON value; None where it is free. Raises InvalidRequest."""
    schema = output_schema(output)
    if use.must_call:
        return model.format.tool_grammar(model.text, prompt, use.callable, parallel)
    if schema is None:
        return None
    if use.callable:
        raise InvalidRequest(
            "response_format", "response_format and tools together need tool_choice 'none' or 'required'."
        )
    return model.format.json_grammar(model.text, prompt, schema)


def output_schema(output: OutputFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema that an answer must have; None for text."""
    if output is None or output.type == "text":
        return None
    if output.type == "json_object":
        return {"type": "object"}
    wanted: JsonSchemaFormat | None = output.json_schema
    if wanted is None:
        raise InvalidRequest(
            "response_format.json_schema", "response_format of type json_schema needs json_schema."
        )
    return wanted.schema_ if wanted.schema_ is not None else {"type": "object"}
