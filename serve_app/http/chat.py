"""``/v1/chat/completions``: a conversation in, the assistant's turn out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from serve_app.http.answers import AnswerIdentity, UsageCount, chat_logprobs
from serve_app.http.backend import ServedModel
from serve_app.http.choices import AnswerPlan, Answers
from serve_app.http.conversation import template_messages
from serve_app.http.schemas import ChatRequest
from worker.errors import InvalidRequest

CHUNK = "chat.completion.chunk"
BODY = "chat.completion"


def plan_chat(body: ChatRequest, model: ServedModel) -> AnswerPlan:
    """What to generate; raises InvalidRequest."""
    if model.template is None:
        raise InvalidRequest(
            "messages",
            f"The model {model.name!r} has no chat template; use /v1/completions or chat_template=FILE.",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    prompt = model.template.render(template_messages(body.messages), None, variables)
    limit = body.token_limit()
    return AnswerPlan(
        prompts=[model.text.encode(prompt)],
        sampling=body.sampling(limit if limit is not None else 2**31, body.num_logprobs()),
        limited=limit is not None,
        num_choices=body.n or 1,
        stop=body.stop_strings(),
        cache_salt=body.cache_salt or "",
        affinity_key=body.user or "",
        arrival_s=time.time(),
    )


async def chat_chunks(
    answers: Answers, body: ChatRequest, plan: AnswerPlan, model: ServedModel
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer: the role, the text, the finish reason, and the usage if asked for."""
    head = AnswerIdentity.new("chatcmpl-", model.name).head(CHUNK)
    usage = UsageCount(plan.num_prompt_tokens)
    begun: set[int] = set()
    async with aclosing(cast("Any", answers)):
        async for index, piece in answers:
            usage.add(index, piece)
            delta: dict[str, Any] = {}
            if index not in begun:
                begun.add(index)
                delta = {"role": "assistant", "content": ""}
            if piece.text:
                delta["content"] = piece.text
            if not (delta or piece.logprobs or piece.finish_reason):
                continue
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": piece.finish_reason}
            if plan.sampling.logprobs is not None:
                choice["logprobs"] = chat_logprobs(model.text, piece.logprobs)
            yield {**head, "choices": [choice]}
    if body.wants_usage():
        yield {**head, "choices": [], "usage": usage.body()}


async def chat_body(answers: Answers, plan: AnswerPlan, model: ServedModel) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    usage = UsageCount(plan.num_prompt_tokens)
    choices = [_choice(index) for index in range(plan.num_choices)]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in choices]
    async with aclosing(cast("Any", answers)):
        async for index, piece in answers:
            usage.add(index, piece)
            choices[index]["message"]["content"] += piece.text
            choices[index]["finish_reason"] = piece.finish_reason
            logprobs[index] += chat_logprobs(model.text, piece.logprobs)["content"]
    if plan.sampling.logprobs is not None:
        for choice, entries in zip(choices, logprobs, strict=True):
            choice["logprobs"] = {"content": entries, "refusal": None}
    return {
        **AnswerIdentity.new("chatcmpl-", model.name).head(BODY),
        "choices": choices,
        "usage": usage.body(),
    }


def _choice(index: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": None}
