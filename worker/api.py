"""The face of a worker: token ids in, token ids out, and what it tells the router about itself.

Values are frozen and travel between processes by pickle. Nothing here imports torch or Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from memory.api import Headroom, KindHeadroom, PageKind
from worker.errors import InvalidRequest

__all__ = [
    "Engine",
    "ExpertResidency",
    "FinishReason",
    "GenerateRequest",
    "Grammar",
    "Headroom",
    "KindHeadroom",
    "ModelInfo",
    "PageKind",
    "RequestTimeline",
    "RequestTransfer",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprobs",
    "WorkerSnapshot",
    "merged_events",
]

MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
"""Every step looks at all of them, for every row of the batch."""


class FinishReason(Enum):
    """Why a request produced its last token."""

    STOP = "stop"
    """An end token, a stop token id, or (set by the text layer) a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the model's context is full."""
    ABORT = "abort"
    """The caller left or the worker drained."""
    ERROR = "error"
    """The engine failed; :attr:`TokenEvent.error` says how."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match: ``kind`` is ``json_object``, ``json_schema``, ``regex`` or ``lark``; ``text`` its
    source (a JSON text for schemas, empty for json_object). ``after_token_id``: enforce only behind the first
    occurrence of that generated token (e.g. the end of the reasoning), None: from the first token."""

    kind: str
    text: str = ""
    after_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Neutral values switch a rule off.

    Order (as in the OpenAI and Hugging Face conventions): penalties and ``logit_bias`` on the raw logits, then
    temperature, then top-k, top-p and min-p on what is left. ``temperature`` 0 is greedy, ties go to the lowest id.
    Log-probabilities are of the raw logits, before all rules.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        top_k: keep the k likeliest; 0 keeps all.
        seed: noise is a hash of (seed, position); None lets the engine choose one.
        logprobs: None for none, n >= 0 for the chosen token's and the n likeliest tokens' log-probabilities.
        stop_token_ids: end the output besides the model's own end tokens.
        min_tokens: end tokens are impossible before so many tokens.
        ignore_eos: the model's end tokens do not end the output (stop_token_ids still do).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _in_range("max_tokens", self.max_tokens, 1, None)
        _in_range("temperature", self.temperature, 0.0, 10.0)
        _in_range("top_k", self.top_k, 0, None)
        _in_range("top_p", self.top_p, 1e-9, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), MAX_SEED)
        if self.logprobs is not None:
            _in_range("top_logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _few("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _few("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -100.0, 100.0)


def _few(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(name, f"{name} has {count} entries; at most {most} are allowed.")


def _in_range(name: str, value: float, low: float | None, high: float | None) -> None:
    # `not (a <= b)` instead of `a > b`: a NaN must fail.
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise InvalidRequest(name, f"{name} must be {bounds}, not {value}.")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue.

    Attributes:
        request_id: unique among the worker's live requests.
        prompt_token_ids: at least one token.
        sampling: how to draw.
        cache_salt: prefixes are shared only between requests of equal salt.
        grammar: what the output must match, or None.
        affinity_key: conversation or tenant; workers only pass it back in what they learn of expert use.
        arrival_s: Unix time at which the service received the request, for timelines; 0 if unknown.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    grammar: Grammar | None = None
    affinity_key: str = ""
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequest("prompt", "The prompt is empty.")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one generated token and of the likeliest alternatives, best first (natural logarithm)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """Stamps of one request on the worker, Unix seconds; 0 where it never came so far. ``retracted_s``: of each
    retraction, the first 16 at most."""

    queued_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_retractions: int = 0
    retracted_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What a stream brings: 0..n new tokens, and on the last event why it ended.

    A token that ended the output (end token or stop token id) is the last of ``token_ids``, counts as generated,
    and is named in ``stop_token_id`` so that the text layer can leave it out. ``logprobs`` has one entry per token
    when they were asked for. ``timeline`` comes with the first event, as far as it goes then, and with the last.
    ``used_expert_bits`` may come with an event that ends an output (STOP, LENGTH) where experts are paged: a bit per
    (layer, expert), ordered as :class:`ExpertResidency`'s, set where the output's tokens, since the request last took a
    row, chose the expert at least half as often as the layer's experts on average.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    num_generated: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str = ""
    timeline: RequestTimeline | None = None
    used_expert_bits: bytes | None = None

    def merged_with(self, later: TokenEvent) -> TokenEvent:
        """This event and the next one of the same stream as one, for readers that are behind."""
        return merged_events((self, later))


def merged_events(events: Sequence[TokenEvent]) -> TokenEvent:
    """Successive events of one stream, at least one, as one."""
    last = events[-1]
    if len(events) == 1:
        return last
    return TokenEvent(
        request_id=last.request_id,
        token_ids=tuple(chain.from_iterable([event.token_ids for event in events])),
        num_generated=last.num_generated,
        logprobs=tuple(chain.from_iterable([event.logprobs for event in events])),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
        timeline=next((event.timeline for event in reversed(events) if event.timeline is not None), None),
        used_expert_bits=last.used_expert_bits,
    )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded model that the layers above need; fixed for a worker's life."""

    name: str
    folder: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_experts: int = 0
    experts_per_token: int = 0
    dtype: str = "float32"
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class ExpertResidency:
    """Which experts are on the device: ``bits`` has one bit per (layer, expert), layer-major, lowest bit first.

    A delta (``base_generation`` set) holds the bits that flipped since that generation, as an xor mask.
    """

    num_layers: int
    num_experts: int
    generation: int
    bits: bytes
    base_generation: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker's state at one moment. Counters grow for a worker's life; rates are per second over the last seconds.

    ``sequence`` orders the snapshots of one worker; ``num_submitted`` counts accepted requests, so a reader knows
    which of its own placements the snapshot already contains. ``num_steps`` advances whenever the loop does.
    ``draining``: it takes no more requests, also because it is dead.
    """

    sequence: int
    time_s: float
    num_steps: int
    num_submitted: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    max_running: int
    headroom: Headroom
    num_finished: int = 0
    num_aborted: int = 0
    num_retractions: int = 0
    retraction_rate: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_wait_s: float = 0.0
    step_s: float = 0.0
    draining: bool = False
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes_paged: int = 0
    experts: ExpertResidency | None = None
    extra: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One GPU's worth of generation. ``submit``, ``abort``, ``snapshot`` and ``check_health`` may be called from any
    thread and do not block on the device; ``stream`` and ``drain`` run on the caller's event loop."""

    @property
    def model(self) -> ModelInfo:
        """The loaded model's facts."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request. Raises InvalidRequest (what this model cannot do), PromptTooLong, Overloaded (draining
        or the engine's own queue is full), EngineDead."""
        ...

    def stream(self, request_id: str) -> AsyncIterator[TokenEvent]:
        """The request's events, in order, up to and including one with a ``finish_reason``. A reader that is behind
        gets merged events; closing the iterator early aborts the request. KeyError for an unknown id. One reader."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request after the step in flight; its stream closes with ABORT. Unknown ids are ignored."""
        ...

    def snapshot(self) -> WorkerSnapshot:
        """The state now."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests and waits for the running ones; answers how many were left and aborted."""
        ...

    def check_health(self) -> None:
        """Raises EngineDead if the loop failed, or has work and did not advance for too long."""
        ...

    def close(self) -> None:
        """Stops the engine and gives its memory back; streams still open end with ABORT. May be called twice."""
        ...


@runtime_checkable
class RequestTransfer(Protocol):
    """Optional: move a request with its pages to another worker (disaggregation, migration)."""

    def export_request(self, request_id: str) -> Mapping[str, Any]:
        """Stops the request after the step in flight and answers its tokens, counters and virtual pages' bytes."""
        ...

    def import_request(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``export_request`` answered; the stream goes on under the same request id."""
        ...
