"""Starts the answers of one request (its prompts times ``n``) and joins them into one stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from serve_app.http.backend import Backend, ServedModel
from serve_app.text.output import OutputPiece, TokenStream, read_output
from worker.api import MAX_SEED, GenerateRequest, Grammar, SamplingParams
from worker.errors import InvalidRequest, PromptTooLong

MAX_ANSWERS = 128
_END = None


@dataclass(frozen=True)
class AnswerPlan:
    """What is to be generated.

    Attributes:
        prompts: token ids of each prompt.
        sampling: how; ``max_tokens`` is a limit only if ``limited``.
        limited: False when the client gave no limit: then the answer may fill the model's context.
        num_choices: answers per prompt; a seed is raised by one for each.
        stop: strings that end an answer.
        cache_salt: see :class:`worker.api.GenerateRequest`.
        affinity_key: conversation or tenant.
        keep_special: ids of special tokens that stay in the text.
        grammar: what every answer must match.
        arrival_s: Unix time.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    limited: bool
    num_choices: int = 1
    stop: Sequence[str] = ()
    cache_salt: str = ""
    affinity_key: str = ""
    keep_special: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    arrival_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)


Answers = AsyncIterator[tuple[int, OutputPiece]]


async def start_answers(backend: Backend, model: ServedModel, plan: AnswerPlan) -> Answers:
    """Opens all answers; the iterator brings ``(choice index, piece)``, and closing it aborts what still runs.

    Raises what :meth:`Backend.open` raises; then no answer is left running.
    """
    count = len(plan.prompts) * plan.num_choices
    if count > MAX_ANSWERS:
        raise InvalidRequest("n", f"{count} answers in one request are more than {MAX_ANSWERS}.")
    if count == 1:
        events = [await _open(backend, model, plan, 0)]
    else:
        events = await _open_all(backend, model, plan, count)
    outputs = [read_output(stream, model.text, plan.stop, plan.keep_special) for stream in events]
    return _single(outputs[0]) if count == 1 else _joined(outputs, events)


async def _open_all(backend: Backend, model: ServedModel, plan: AnswerPlan, count: int) -> list[TokenStream]:
    opening = [asyncio.create_task(_open(backend, model, plan, index)) for index in range(count)]
    try:
        return list(await asyncio.gather(*opening))
    except BaseException:
        for task in opening:
            task.cancel()
        for opened in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(opened, BaseException):
                await opened.aclose()
        raise


async def _open(backend: Backend, model: ServedModel, plan: AnswerPlan, index: int) -> TokenStream:
    request = _request(plan, index)
    if not plan.limited:
        info = await backend.model_info(model.name)
        room = info.max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise PromptTooLong(len(request.prompt_token_ids) + 1, info.max_model_len)
        request = replace(request, sampling=replace(request.sampling, max_tokens=room))
    try:
        return await backend.open(model.name, request)
    except PromptTooLong as error:
        room = error.max_tokens - len(request.prompt_token_ids)
        if plan.limited or room < max(1, request.sampling.min_tokens):
            raise
        # No limit was asked for, and the arena holds less than the context: as much as fits is what was meant.
        request = replace(request, sampling=replace(request.sampling, max_tokens=room))
        return await backend.open(model.name, request)


def _request(plan: AnswerPlan, index: int) -> GenerateRequest:
    sampling = plan.sampling
    choice = index % plan.num_choices
    if sampling.seed is not None and choice:
        sampling = replace(sampling, seed=min(sampling.seed, MAX_SEED - choice) + choice)
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(plan.prompts[index // plan.num_choices]),
        sampling=sampling,
        cache_salt=plan.cache_salt,
        grammar=plan.grammar,
        affinity_key=plan.affinity_key,
        arrival_s=plan.arrival_s,
    )


async def _single(stream: AsyncIterator[OutputPiece]) -> Answers:
    async with aclosing(cast("Any", stream)):
        async for piece in stream:
            yield 0, piece


async def _joined(outputs: Sequence[AsyncIterator[OutputPiece]], events: Sequence[TokenStream]) -> Answers:
    """The outputs' pieces as they come; the first error of one ends all."""
    # One place per output: a slow reader stops the pumps, and the engine's own mailboxes merge what waits.
    queue: asyncio.Queue[tuple[int, OutputPiece | Exception | None]] = asyncio.Queue(len(outputs))
    pumps = [asyncio.create_task(_pump(index, output, queue)) for index, output in enumerate(outputs)]
    try:
        running = len(pumps)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is _END:
                running -= 1
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in events:  # a pump that never ran has not closed its own
            await stream.aclose()


async def _pump(index: int, output: AsyncIterator[OutputPiece], queue: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(cast("Any", output)):
            async for piece in output:
                await queue.put((index, piece))
        await queue.put((index, _END))
    except Exception as error:
        await queue.put((index, error))
