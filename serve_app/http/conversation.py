"""A request's messages as chat templates expect them: text contents, tool arguments as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.http.schemas import ChatMessage, ContentPart, check_json
from worker.errors import InvalidRequest

_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Plain dictionaries for a template; raises InvalidRequest naming a part that is no text."""
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    # Templates know "system"; "developer" is its newer name.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content_text(message.content, f"{where}.content")}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": tool_arguments(call.function.arguments, f"{where}.tool_calls.{index}"),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return plain


def content_text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """The text of a content; parts are joined. Raises InvalidRequest naming a part of another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in _TEXT_PARTS:
            texts.append(part.text or "")
        else:
            raise InvalidRequest(
                f"{where}.{index}", f"Parts of type {part.type!r} cannot be read; send text."
            )
    return "".join(texts)


def tool_arguments(arguments: str | Mapping[str, Any] | None, where: str) -> Mapping[str, Any]:
    """Arguments as an object; clients send them as JSON text. Raises InvalidRequest for text that is no object."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
        check_json(found)
    except ValueError as error:
        raise InvalidRequest(f"{where}.function.arguments", f"The arguments are not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"{where}.function.arguments", "The arguments are nested too deeply.") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{where}.function.arguments", "The arguments are JSON, but no object.")
    return found
