"""Starts the answers of one request (its prompts times ``n``) and joins them into one stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
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
    if count > 1:
        return await _start_all(backend, model, plan, count)
    events = await _open(backend, model, plan, 0)
    return _single(read_output(events, model.text, plan.stop, plan.keep_special))


async def _start_all(backend: Backend, model: ServedModel, plan: AnswerPlan, count: int) -> Answers:
    """Reads each answer from the moment it is open: one that is not read keeps its place at the worker, and those that
    wait for a place would wait for it, as would those of another request."""
    joined = _JoinedAnswers(count)
    opened = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for index, future in enumerate(opened):
        joined.start(_read(backend, model, plan, index, future, joined))
    try:
        await asyncio.gather(*opened)
    except BaseException:
        await joined.aclose()
        raise
    joined.hold_back()
    return joined


async def _read(
    backend: Backend,
    model: ServedModel,
    plan: AnswerPlan,
    index: int,
    opened: asyncio.Future[None],
    joined: _JoinedAnswers,
) -> None:
    try:
        events = await _open(backend, model, plan, index)
    except Exception as error:
        if not opened.done():
            opened.set_exception(error)
        return
    async with aclosing(events):
        if not opened.done():
            opened.set_result(None)
        try:
            async for piece in read_output(events, model.text, plan.stop, plan.keep_special):
                await joined.put((index, piece))
            await joined.put(_END)
        except Exception as error:
            await joined.put(error)


async def _open(backend: Backend, model: ServedModel, plan: AnswerPlan, index: int) -> TokenStream:
    request = _request(plan, index)
    if not plan.limited:
        info = await backend.model_info(model.name)
        room = info.max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise PromptTooLong(len(request.prompt_token_ids) + 1, info.max_model_len)
        request = replace(request, sampling=replace(request.sampling, max_tokens=room))
    # Where no limit was asked for, and the arena holds less than the context, as much as fits is what was meant.
    return await backend.open(model.name, request, may_shorten=not plan.limited)


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


class _JoinedAnswers:
    """The pieces of several answers as they come; the first error of one ends all. Closing it ends their tasks."""

    def __init__(self, count: int) -> None:
        self._running = count
        self._tasks: list[asyncio.Task[None]] = []
        # One place per answer: a slow reader stops the tasks, and the engine's own mailboxes merge what waits.
        self._places = asyncio.Semaphore(count)
        self._holds_back = False
        self._queue: asyncio.Queue[tuple[bool, tuple[int, OutputPiece] | Exception | None]] = asyncio.Queue()

    def start(self, reading: Coroutine[Any, Any, None]) -> None:
        """Takes in a task that puts one answer's pieces, and :data:`_END` or its error at last."""
        self._tasks.append(asyncio.create_task(reading))

    def hold_back(self) -> None:
        """From here on somebody reads: the tasks keep to the reader's pace."""
        self._holds_back = True

    async def put(self, item: tuple[int, OutputPiece] | Exception | None) -> None:
        """Hands an item to the reader; waits for a place where it holds back."""
        takes_place = self._holds_back
        if takes_place:
            await self._places.acquire()
        self._queue.put_nowait((takes_place, item))

    def __aiter__(self) -> _JoinedAnswers:
        return self

    async def __anext__(self) -> tuple[int, OutputPiece]:
        while self._running:
            took_place, item = await self._queue.get()
            if took_place:
                self._places.release()
            if item is _END:
                self._running -= 1
            elif isinstance(item, Exception):
                await self.aclose()
                raise item
            else:
                return item
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Aborts what still runs; may be called twice."""
        self._running = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
