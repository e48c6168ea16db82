"""One answer as it grows: worker events in, pieces of text with their tokens, log-probabilities and ending out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from serve_app.text.detokenizer import Detokenizer
from serve_app.text.tokenizer import TextModel
from worker.api import FinishReason, TokenEvent, TokenLogprobs
from worker.errors import EngineDead


class TokenStream(Protocol):
    """The events of a started request, in order, up to one with a finish reason. Closing it early, read or not,
    aborts the request; closing it twice is allowed."""

    def __aiter__(self) -> TokenStream: ...

    async def __anext__(self) -> TokenEvent: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class KeepsCount(Protocol):
    """A stream that counts how answers end; a stream need not."""

    def completed(self) -> None:
        """The answer is whole, although its request is not over: a stop string ended it, and closing follows."""
        ...


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What one event added to an answer.

    Attributes:
        text: new text, without end tokens and stop strings.
        token_ids: new tokens that count, end tokens included.
        num_generated: tokens of the answer so far.
        logprobs: one entry per new token that stands for text, when asked for.
        finish_reason: ``stop`` or ``length`` on the last piece.
        num_cached: on the last piece, prompt tokens whose pages were reused.
    """

    text: str
    token_ids: tuple[int, ...]
    num_generated: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    num_cached: int = 0


async def read_output(
    events: TokenStream,
    text: TextModel,
    stop: Sequence[str],
    keep_special: frozenset[int] = frozenset(),
) -> AsyncIterator[OutputPiece]:
    """Pieces of one answer; closes ``events`` (which aborts the request) when a stop string or the reader ends it.

    Raises:
        EngineDead: the engine failed, or gave the request up, before it was done.
    """
    decoder = Detokenizer(text, stop, keep_special)
    num_generated = num_cached = 0
    async with aclosing(events):
        async for event in events:
            shown = event.token_ids[:-1] if event.stop_token_id is not None else event.token_ids
            step = decoder.push(shown)
            # With the first event: a stop string ends the answer before the last one.
            if event.timeline is not None:
                num_cached = event.timeline.num_cached_tokens
            if step.stop is not None:
                if isinstance(events, KeepsCount):
                    events.completed()
                num_generated += step.num_tokens
                taken = shown[: step.num_tokens]
                logprobs = event.logprobs[: len(taken)]
                yield OutputPiece(step.text, taken, num_generated, logprobs, "stop", num_cached)
                return
            num_generated += len(event.token_ids)
            failed = event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            if failed and shown:
                yield OutputPiece(step.text, event.token_ids, num_generated, event.logprobs[: len(shown)])
            _raise_if_failed(event)
            done = event.finish_reason is not None
            yield OutputPiece(
                step.text + (decoder.finish().text if done else ""),
                event.token_ids,
                num_generated,
                event.logprobs[: len(shown)],
                event.finish_reason.value if event.finish_reason is not None else None,
                num_cached if done else 0,
            )
            if done:
                return
    raise EngineDead("the stream of tokens ended without an end")


def _raise_if_failed(event: TokenEvent) -> None:
    if event.finish_reason is FinishReason.ERROR:
        raise EngineDead(event.error or "the engine failed")
    if event.finish_reason is FinishReason.ABORT:
        raise EngineDead(event.error or "the worker gave the request up (it is shutting down)")
