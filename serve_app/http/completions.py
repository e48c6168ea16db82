"""``/v1/completions``: raw prompts, text out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from serve_app.http.answers import AnswerIdentity, CompletionLogprobs, UsageCount
from serve_app.http.backend import ServedModel
from serve_app.http.choices import AnswerPlan, Answers
from serve_app.http.schemas import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from serve_app.http.streaming import Chunk, EventTemplate
from serve_app.text.tokenizer import TextModel
from worker.errors import InvalidRequest

KIND = "text_completion"


def plan_completion(body: CompletionRequest, model: ServedModel) -> AnswerPlan:
    """What to generate; raises InvalidRequest."""
    count = body.n or 1
    if body.best_of not in (None, count):
        raise InvalidRequest("best_of", "best_of is supported only where it equals n.")
    prompts = [
        model.text.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        for prompt in body.prompts()
    ]
    limit = body.max_tokens if body.max_tokens is not None else DEFAULT_COMPLETION_TOKENS
    return AnswerPlan(
        prompts=prompts,
        sampling=body.sampling(limit, body.logprobs),
        limited=True,
        num_choices=count,
        stop=body.stop_strings(),
        cache_salt=body.cache_salt or "",
        affinity_key=body.user or "",
        arrival_s=time.time(),
    )


async def completion_chunks(
    answers: Answers, body: CompletionRequest, plan: AnswerPlan, model: ServedModel
) -> AsyncIterator[Chunk]:
    """The chunks of a streamed completion."""
    head = {**AnswerIdentity.new("cmpl-", model.name).head(KIND), **body.usage_to_come()}
    usage = UsageCount(plan.num_prompt_tokens)
    logprobs: dict[int, CompletionLogprobs] = {}
    plain: dict[int, EventTemplate] = {}
    async with aclosing(cast("Any", answers)):
        async for index, piece in answers:
            usage.add(index, piece)
            if not (piece.text or piece.logprobs or piece.finish_reason):
                continue
            if body.logprobs is None and piece.finish_reason is None:
                if index not in plain:
                    plain[index] = EventTemplate({**head, "choices": [_choice(index, "", None)]}, "text")
                yield plain[index].fill(piece.text)
                continue
            choice = _choice(index, piece.text, piece.finish_reason)
            if body.logprobs is not None:
                written = logprobs.setdefault(index, CompletionLogprobs(model.text))
                choice["logprobs"] = written.body(piece.logprobs)
            yield {**head, "choices": [choice]}
    if body.wants_usage():
        yield {**head, "choices": [], "usage": usage.body()}


async def completion_body(
    answers: Answers, body: CompletionRequest, plan: AnswerPlan, model: ServedModel
) -> dict[str, Any]:
    """The body of a completion that is not streamed."""
    usage = UsageCount(plan.num_prompt_tokens)
    choices = [_choice(index, "", None) for index in range(len(plan.prompts) * plan.num_choices)]
    logprobs = [CompletionLogprobs(model.text) for _ in choices]
    async with aclosing(cast("Any", answers)):
        async for index, piece in answers:
            usage.add(index, piece)
            choice = choices[index]
            if body.logprobs is not None:
                _extend_logprobs(choice, logprobs[index].body(piece.logprobs))
            choice["text"] += piece.text
            choice["finish_reason"] = piece.finish_reason
    head = AnswerIdentity.new("cmpl-", model.name).head(KIND)
    return {**head, "choices": choices, "usage": usage.body()}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _extend_logprobs(choice: dict[str, Any], more: dict[str, Any]) -> None:
    if choice["logprobs"] is None:
        choice["logprobs"] = more
        return
    for key, values in more.items():
        choice["logprobs"][key].extend(values)


def text_of(text: TextModel, token_ids: list[int]) -> str:
    """The text of ids without special tokens; bytes that are no character show as U+FFFD."""
    return b"".join(text.bytes_of(token_id) for token_id in token_ids).decode("utf-8", errors="replace")
