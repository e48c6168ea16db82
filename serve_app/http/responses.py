"""``/v1/responses``: the same conversations under the newer API; each is carried out as a chat."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

from pydantic import ValidationError

from serve_app.http.answers import UsageCount
from serve_app.http.backend import ServedModel
from serve_app.http.chat import ChatPlan
from serve_app.http.choices import Answers
from serve_app.http.conversation import content_text
from serve_app.http.errors import describe_error
from serve_app.http.response_events import Event, ResponseBuilder
from serve_app.http.response_schemas import InputItem, ResponseRequest, ResponseTool
from serve_app.http.schemas import ChatRequest
from worker.errors import InvalidRequest

logger = logging.getLogger(__name__)


def as_chat(body: ResponseRequest) -> ChatRequest:
    """The chat request that means the same; raises InvalidRequest naming what cannot be carried over."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [_tool(tool, index) for index, tool in enumerate(body.tools or [])] or None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _output_format(body),
        "reasoning_effort": effort,
        "user": body.user or body.prompt_cache_key,
        "cache_salt": body.cache_salt,
    }
    try:
        return ChatRequest.model_validate({name: value for name, value in chat.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(field, f"{field}: {first['msg']}") from error


async def response_events(
    answers: Answers, body: ResponseRequest, plan: ChatPlan, model: ServedModel
) -> AsyncIterator[Event]:
    """The events of a streamed response; it ends with one of completed, incomplete or failed."""
    builder = ResponseBuilder(_settings(body, model))
    usage = UsageCount(plan.answer.num_prompt_tokens)
    reader = plan.reader(model)
    begun = False
    reason: str | None = None
    async with aclosing(cast("Any", answers)):
        try:
            async for index, piece in answers:
                if not begun:
                    begun = True
                    for event in builder.begin():
                        yield event
                usage.add(index, piece)
                said, reason = reader.read(piece)
                for event in builder.add(said, reader):
                    yield event
        except Exception as error:
            if not begun:
                raise
            answer = describe_error(error)
            if answer.status == 500:
                logger.exception("a response broke")
            yield builder.fail("server_error", answer.message)
            return
    usage.num_reasoning_tokens = reader.num_reasoning_tokens(model.text)
    for event in builder.end(usage_body(usage), reason):
        yield event


async def response_body(
    answers: Answers, body: ResponseRequest, plan: ChatPlan, model: ServedModel
) -> dict[str, Any]:
    """The body of a response that is not streamed: what its last event carries. Raises what broke it."""
    builder = ResponseBuilder(_settings(body, model))
    usage = UsageCount(plan.answer.num_prompt_tokens)
    reader = plan.reader(model)
    reason: str | None = None
    async with aclosing(cast("Any", answers)):
        async for index, piece in answers:
            usage.add(index, piece)
            said, reason = reader.read(piece)
            for _ in builder.add(said, reader):
                pass
    last: Event = {}
    usage.num_reasoning_tokens = reader.num_reasoning_tokens(model.text)
    for event in builder.end(usage_body(usage), reason):
        last = event
    found: dict[str, Any] = last["response"]
    return found


def usage_body(usage: UsageCount) -> dict[str, Any]:
    """``usage`` under this API's names."""
    plain = usage.body()
    return {
        "input_tokens": plain["prompt_tokens"],
        "input_tokens_details": plain["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": plain["completion_tokens"],
        "output_tokens_details": plain["completion_tokens_details"],
        "total_tokens": plain["total_tokens"],
    }


def _settings(body: ResponseRequest, model: ServedModel) -> Mapping[str, Any]:
    """What a response repeats of its request."""
    plain = body.model_dump(by_alias=True, exclude_none=True)
    return {
        "model": model.name,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": plain.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": plain.get("text") or {"format": {"type": "text"}},
        "tool_choice": plain.get("tool_choice", "auto"),
        "tools": [{"strict": None, **tool} for tool in plain.get("tools", [])],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thought = ""
    for index, item in enumerate(body.input):
        kind = item.type or ("message" if item.role is not None else None)
        where = f"input.{index}"
        if kind == "reasoning":
            thought += content_text(item.content or item.summary, where)
        elif kind == "function_call":
            _add_call(messages, item, where, thought)
            thought = ""
        else:
            message = _message(item, kind, where)
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            messages.append(message)
    if not messages:
        raise InvalidRequest("input", "The input is empty.")
    return messages


def _message(item: InputItem, kind: str | None, where: str) -> dict[str, Any]:
    if kind == "message":
        if item.role is None:
            raise InvalidRequest(f"{where}.role", "A message has a role.")
        return {"role": item.role, "content": content_text(item.content, f"{where}.content")}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item.call_id,
            "content": content_text(item.output, f"{where}.output"),
        }
    raise InvalidRequest(f"{where}.type", f"Items of type {kind!r} are not supported.")


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str, thought: str) -> None:
    if item.name is None or item.call_id is None:
        raise InvalidRequest(where, "A function_call has name and call_id.")
    call = {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments or ""},
    }
    if not messages or messages[-1]["role"] != "assistant":
        # Calls and the text ahead of them are one turn.
        messages.append({"role": "assistant", "content": None})
    if thought:
        messages[-1]["reasoning_content"] = thought
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        raise InvalidRequest(
            f"tools.{index}.type", "Only tools of type 'function', with a name, can be called here."
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def _tool_choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "function" or choice.name is None:
        raise InvalidRequest("tool_choice", "tool_choice is auto, none, required, or names a function.")
    return {"type": "function", "function": {"name": choice.name}}


def _output_format(body: ResponseRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}
