"""One request's life on a worker: its tokens, its stamps and where it stands."""

from __future__ import annotations

from enum import Enum

import numpy as np

from worker.api import GenerateRequest, RequestTimeline
from worker.scheduling.step import IntArray

MAX_RETRACTION_STAMPS = 16
"""The count goes on behind it."""


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """A request known by ``number``, which grows with the order of arrival.

    ``generated`` may lag behind while the request runs: the newest tokens lie in the row table until they are
    flushed. ``prefill`` holds the tokens known when the request last took a slot.
    """

    __slots__ = (
        "asked",
        "branch_tokens",
        "first_token_s",
        "generated",
        "num_cached_tokens",
        "num_retractions",
        "number",
        "prefill",
        "queued_s",
        "retracted_s",
        "scheduled_s",
        "seed",
        "status",
        "waiting_since_s",
    )

    def __init__(self, number: int, asked: GenerateRequest, seed: int, now_s: float) -> None:
        self.number = number
        self.asked = asked
        self.seed = seed
        self.status = Status.WAITING
        self.generated: list[int] = []
        self.prefill: IntArray = np.asarray(asked.prompt_token_ids, dtype=np.int64)
        self.branch_tokens = 0
        """how many leading tokens an earlier prompt shares: a place to keep the state"""
        self.num_cached_tokens = 0
        self.num_retractions = 0
        self.queued_s = now_s
        self.waiting_since_s = now_s
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.retracted_s: tuple[float, ...] = ()

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.asked.prompt_token_ids)

    @property
    def max_total(self) -> int:
        """Most tokens, prompt and output together."""
        return self.num_prompt + self.asked.sampling.max_tokens

    @property
    def ends_at_limit(self) -> bool:
        """Whether no token can end the output early."""
        sampling = self.asked.sampling
        return sampling.ignore_eos and not sampling.stop_token_ids and self.asked.grammar is None

    @property
    def num_known(self) -> int:
        """Tokens known, prompt and flushed output together."""
        return self.num_prompt + len(self.generated)

    def known_token_ids(self) -> tuple[int, ...]:
        """Prompt and flushed output."""
        return (
            self.asked.prompt_token_ids + tuple(self.generated)
            if self.generated
            else self.asked.prompt_token_ids
        )

    def timeline(self, num_generated: int, finished_s: float = 0.0) -> RequestTimeline:
        """The stamps as they go out with the first event and the last one."""
        return RequestTimeline(
            queued_s=self.queued_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=finished_s,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=num_generated,
            num_retractions=self.num_retractions,
            retracted_s=self.retracted_s,
        )
