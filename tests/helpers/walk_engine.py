"""An engine that draws any allowed token: structured output over the whole API without a model.

It ends strings, lists and objects more often than chance would, so that answers stay short; without a grammar it
repeats a scripted text.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from random import Random

import numpy as np

from memory.api import Headroom
from worker.api import FinishReason, GenerateRequest, ModelInfo, TokenEvent, WorkerSnapshot
from worker.errors import PromptTooLong
from worker.grammar import GrammarMatchers

CLOSERS = b'"}],'
CLOSE_SHARE = 0.4


class WalkEngine:
    """See the module's docstring. ``lead``: text ahead of every grammar-bound answer (a reasoning, for example)."""

    def __init__(
        self, folder: Path, vocab_size: int, end: int, lead: str = "", max_model_len: int = 4096
    ) -> None:
        self._grammars = GrammarMatchers((folder / "tokenizer.json").read_text(), vocab_size, [end])
        self._end = end
        self._lead = list(lead.encode())
        self._numbers = itertools.count(1)
        self._requests: dict[str, GenerateRequest] = {}
        self._num_submitted = 0
        self._num_aborted = 0
        self.model = ModelInfo("walk", str(folder), "Walk", vocab_size, max_model_len, (end,), 1)

    def submit(self, request: GenerateRequest) -> None:
        """Checks and keeps a request."""
        needed = len(request.prompt_token_ids) + request.sampling.max_tokens
        if needed > self.model.max_model_len:
            raise PromptTooLong(needed, self.model.max_model_len)
        if request.grammar is not None:
            self._grammars.check(request.grammar)
        self._num_submitted += 1
        self._requests[request.request_id] = request

    def stream(self, request_id: str) -> WalkStream:
        """The request's events."""
        request = self._requests[request_id]
        return WalkStream(self, request, self._tokens(request))

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        if self._requests.pop(request_id, None) is not None:
            self._num_aborted += 1

    def finish(self, request_id: str) -> None:
        """A request's stream is over."""
        self._requests.pop(request_id, None)

    def snapshot(self) -> WorkerSnapshot:
        """Counters."""
        return WorkerSnapshot(
            sequence=self._num_submitted,
            time_s=0.0,
            num_steps=self._num_submitted,
            num_submitted=self._num_submitted,
            num_running=len(self._requests),
            num_waiting=0,
            waiting_tokens=0,
            max_running=1000,
            headroom=Headroom(arena_bytes=1 << 30, gap_bytes=1 << 30, kinds={}),
            num_aborted=self._num_aborted,
        )

    async def drain(self, timeout_s: float) -> int:
        """Nothing to wait for."""
        return 0

    def check_health(self) -> None:
        """Always well."""

    def close(self) -> None:
        """Nothing to give back."""

    def _tokens(self, request: GenerateRequest) -> list[int]:
        chance = Random(f"{request.sampling.seed} {request.prompt_token_ids}")
        if request.grammar is None:
            return [*b"free text", self._end][: request.sampling.max_tokens]
        number = next(self._numbers)
        self._grammars.open(number, request.grammar)
        tokens: list[int] = []
        lead = list(self._lead)
        while len(tokens) < request.sampling.max_tokens:
            mask = self._grammars.mask(number)
            token = lead.pop(0) if mask is None and lead else self._draw(mask, chance)
            if mask is None and not lead and request.grammar.after_token_id is not None:
                self._grammars.advance(number, [token])
                tokens.append(token)
                token = request.grammar.after_token_id
            self._grammars.advance(number, [token])
            tokens.append(token)
            if token == self._end:
                break
        self._grammars.close(number)
        return tokens[: request.sampling.max_tokens]

    def _draw(self, mask: np.ndarray | None, chance: Random) -> int:
        if mask is None:
            return ord("x")
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if self._end in allowed and chance.random() < CLOSE_SHARE:
            return self._end
        closers = [byte for byte in CLOSERS if byte in allowed]
        if closers and chance.random() < CLOSE_SHARE:
            return chance.choice(closers)
        return int(chance.choice(allowed))


class WalkStream:
    """Events of a few tokens each."""

    def __init__(self, engine: WalkEngine, request: GenerateRequest, tokens: list[int]) -> None:
        self._engine = engine
        self._request = request
        self._tokens = tokens
        self._sent = 0

    def __aiter__(self) -> WalkStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._sent == len(self._tokens):
            raise StopAsyncIteration
        await asyncio.sleep(0)
        part = tuple(self._tokens[self._sent : self._sent + 7])
        self._sent += len(part)
        done = self._sent == len(self._tokens)
        stopped = done and part[-1] in self._engine.model.eos_token_ids
        if done:
            self._engine.finish(self._request.request_id)
        reason = (FinishReason.STOP if stopped else FinishReason.LENGTH) if done else None
        return TokenEvent(
            self._request.request_id,
            part,
            self._sent,
            finish_reason=reason,
            stop_token_id=part[-1] if stopped else None,
        )

    async def aclose(self) -> None:
        """Leaves."""
        self._engine.abort(self._request.request_id)
