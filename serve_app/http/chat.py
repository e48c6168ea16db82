"""``/v1/chat/completions``: a conversation in, the assistant's turn out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from serve_app.http.answers import AnswerIdentity, UsageCount, chat_logprobs
from serve_app.http.backend import ServedModel
from serve_app.http.choices import AnswerPlan, Answers
from serve_app.http.conversation import template_messages
from serve_app.http.schemas import ChatRequest
from serve_app.http.streaming import Chunk, EventTemplate
from serve_app.http.tools import ToolUse, answer_grammar, read_tools
from serve_app.http.turn import TurnReader
from serve_app.text.chat_formats.base import ChatDelta, Tool
from serve_app.text.literals import Literals
from worker.errors import InvalidRequest

CONTENT_ALONE = {"content"}
CHUNK = "chat.completion.chunk"
BODY = "chat.completion"


@dataclass(frozen=True)
class ChatPlan:
    """What to generate, and what reading the answers takes.

    Attributes:
        answer: what to generate.
        prompt: the rendered conversation.
        tools: what may be called.
        parallel: whether an answer may have several calls.
    """

    answer: AnswerPlan
    prompt: str
    tools: Sequence[Tool]
    parallel: bool

    def reader(self, model: ServedModel) -> TurnReader:
        """A reader for one answer."""
        return TurnReader(model.format.parser(self.prompt, self.tools), self.parallel)


def plan_chat(body: ChatRequest, model: ServedModel) -> ChatPlan:
    """What to generate; raises InvalidRequest."""
    rendered = render_chat(body, model)
    prompt, use = rendered.prompt, rendered.use
    parallel = body.parallel_tool_calls is not False
    limit = body.token_limit()
    answer = AnswerPlan(
        prompts=[rendered.token_ids],
        sampling=body.sampling(limit if limit is not None else 2**31, body.num_logprobs()),
        limited=limit is not None,
        num_choices=body.n or 1,
        stop=body.stop_strings(),
        cache_salt=body.cache_salt or "",
        affinity_key=body.user or "",
        keep_special=model.format.keep_special(model.text),
        grammar=answer_grammar(model, prompt, use, body.response_format, parallel),
        arrival_s=time.time(),
    )
    return ChatPlan(answer, prompt, use.callable, parallel)


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as the model reads it. Special tokens are the template's own: where a message has one in it, the
    ids spell it out. ``use``: what may be done with tools."""

    prompt: str
    token_ids: Sequence[int]
    use: ToolUse


def render_chat(body: ChatRequest, model: ServedModel) -> RenderedChat:
    """The prompt of a conversation; raises InvalidRequest."""
    if model.template is None:
        raise InvalidRequest(
            "messages",
            f"The model {model.name!r} has no chat template; use /v1/completions or chat_template=FILE.",
        )
    use = read_tools(body.tools, body.tool_choice)
    if use.callable and model.format.name == "plain":
        raise InvalidRequest("tools", f"The chat template of {model.name!r} knows no tools; leave them out.")
    literals = Literals(model.text)
    # What a model wrote itself may hold the marks that its format reads.
    own = {model.text.piece(token) for token in model.format.keep_special(model.text)}
    messages = [
        literals.hide(message, own if message.get("role") == "assistant" else ())
        for message in model.format.messages(template_messages(body.messages))
    ]
    variables = literals.hide(_variables(body))
    text = model.template.render(messages, literals.hide(use.described), variables)
    return RenderedChat(literals.show(text), literals.encode(text), use)


async def chat_chunks(
    answers: Answers, body: ChatRequest, plan: ChatPlan, model: ServedModel
) -> AsyncIterator[Chunk]:
    """The chunks of a streamed answer: the role, what is said, the finish reason, and the usage if asked for."""
    head = {**AnswerIdentity.new("chatcmpl-", model.name).head(CHUNK), **body.usage_to_come()}
    usage = UsageCount(plan.answer.num_prompt_tokens)
    readers: dict[int, TurnReader] = {}
    plain: dict[int, EventTemplate] = {}
    async with aclosing(cast("Any", answers)):
        async for index, piece in answers:
            usage.add(index, piece)
            delta: dict[str, Any] = {}
            if index not in readers:
                readers[index] = plan.reader(model)
                delta = {"role": "assistant", "content": ""}
            said, reason = readers[index].read(piece)
            delta |= _delta_body(said, readers[index])
            if not (delta or piece.logprobs or reason):
                continue
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
            if plan.answer.sampling.logprobs is not None:
                choice["logprobs"] = chat_logprobs(model.text, piece.logprobs)
            elif delta.keys() == CONTENT_ALONE and reason is None:
                if index not in plain:
                    empty = {**head, "choices": [{**choice, "delta": {"content": ""}}]}
                    plain[index] = EventTemplate(empty, "content")
                yield plain[index].fill(said.content)
                continue
            yield {**head, "choices": [choice]}
    if body.wants_usage():
        usage.num_reasoning_tokens = _num_reasoning_tokens(readers.values(), model)
        yield {**head, "choices": [], "usage": usage.body()}


async def chat_body(answers: Answers, plan: ChatPlan, model: ServedModel) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    usage = UsageCount(plan.answer.num_prompt_tokens)
    readers = [plan.reader(model) for _ in range(plan.answer.num_choices)]
    said = [ChatDelta() for _ in readers]
    reasons: list[str | None] = [None for _ in readers]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in readers]
    async with aclosing(cast("Any", answers)):
        async for index, piece in answers:
            usage.add(index, piece)
            delta, reasons[index] = readers[index].read(piece)
            said[index] += delta
            if plan.answer.sampling.logprobs is not None:
                logprobs[index] += chat_logprobs(model.text, piece.logprobs)["content"]
    usage.num_reasoning_tokens = _num_reasoning_tokens(readers, model)
    choices = [
        {
            "index": index,
            "message": _message(said[index], reader),
            "logprobs": None,
            "finish_reason": reasons[index],
        }
        for index, reader in enumerate(readers)
    ]
    if plan.answer.sampling.logprobs is not None:
        for choice, entries in zip(choices, logprobs, strict=True):
            choice["logprobs"] = {"content": entries, "refusal": None}
    return {
        **AnswerIdentity.new("chatcmpl-", model.name).head(BODY),
        "choices": choices,
        "usage": usage.body(),
    }


def _variables(body: ChatRequest) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    return variables


def _num_reasoning_tokens(readers: Iterable[TurnReader], model: ServedModel) -> int:
    return sum(reader.num_reasoning_tokens(model.text) for reader in readers)


def _delta_body(said: ChatDelta, reader: TurnReader) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if said.content:
        delta["content"] = said.content
    if said.reasoning:
        delta["reasoning_content"] = said.reasoning
    if said.tools:
        delta["tool_calls"] = [
            {"index": tool.index, "function": {"arguments": tool.arguments}}
            if tool.name is None
            else {
                "index": tool.index,
                "id": reader.call_id(tool.index),
                "type": "function",
                "function": {"name": tool.name, "arguments": tool.arguments},
            }
            for tool in said.tools
        ]
    return delta


def _message(said: ChatDelta, reader: TurnReader) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tools:
        message["content"] = said.content or None
        message["tool_calls"] = [
            {
                "id": reader.call_id(tool.index),
                "type": "function",
                "function": {"name": tool.name, "arguments": tool.arguments},
            }
            for tool in said.tools
        ]
    return message
