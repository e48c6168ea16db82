"""What the HTTP layer needs from whatever runs the models: the Router in production, one engine in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.text.chat_formats.base import ChatFormat
from serve_app.text.chat_template import ChatTemplate
from serve_app.text.output import TokenStream
from serve_app.text.tokenizer import TextModel
from worker.api import GenerateRequest, ModelInfo


@dataclass(frozen=True)
class ServedModel:
    """A model as clients see it.

    Attributes:
        name: what requests call it.
        text: its tokenizer.
        template: its chat template, or None when the checkpoint has none.
        format: how it marks reasoning and calls.
        created_s: Unix time at which this process began to serve it.
    """

    name: str
    text: TextModel
    template: ChatTemplate | None
    format: ChatFormat
    created_s: int


class Backend(Protocol):
    """Runs requests. All methods are called on one event loop."""

    def models(self) -> Sequence[ServedModel]:
        """The models served here; the first one is meant when a request names none."""
        ...

    async def model_info(self, name: str) -> ModelInfo:
        """Facts of the loaded model; waits for the first worker, Overloaded when none comes in time."""
        ...

    async def open(self, name: str, request: GenerateRequest, may_shorten: bool = False) -> TokenStream:
        """Queues, places and starts a request. ``may_shorten``: where a worker's memory holds the prompt but not all of
        ``max_tokens`` besides, as many as fit are asked for instead.

        Answers with the first tokens at hand. The stream raises EngineDead or WorkerLost when the worker fails later.

        Raises:
            InvalidRequest, PromptTooLong: the worker cannot serve the request as it is.
            Overloaded: the queue is full, or the request waited too long in it.
            EngineDead, WorkerLost: no worker could start it.
        """
        ...

    def is_ready(self) -> bool:
        """Whether a worker has reported lately."""
        ...

    async def metrics_page(self) -> tuple[bytes, str]:
        """The metrics in Prometheus text form, and its content type."""
        ...
