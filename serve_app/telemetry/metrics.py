"""The one table of metric names: what each figure is called, what it means, and where it comes from.

Figures of a Router's own are counted there. Those of workers are read from their last snapshots at the moment of a
scrape, so that they cost a step nothing; a worker that does not report a figure has no series: no data is not zero.
"""

from __future__ import annotations

from serve_app.telemetry.metric import Metric
from serve_app.telemetry.worker_metrics import WORKER_METRICS

SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Has the bounds that a promise to clients usually names, so that the share that kept it can be read off."""
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
HTTP_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)
"""As the HTTP conventions advise, and further: streams take minutes."""

# -- a Router's own ---------------------------------------------------------------------------------------------------

OF_MODEL = ("model",)
OUTCOMES = ("stop", "length", "invalid", "refused", "left", "expired", "failed")
REFUSAL_REASONS = ("queue_full", "deadline", "waited", "worker", "no_worker")
RETRY_REASONS = ("refused", "lost", "gone")
"""All that there are, each told from the start as 0: a series that is born with its first event has no rate of it, and
a share of none is no data."""

REQUESTS = Metric(
    "headroom.requests",
    "counter",
    "{request}",
    "Answers that ended, by how: stop, length, or invalid, refused, left, expired, failed.",
    ("model", "outcome"),
)
REFUSALS = Metric(
    "headroom.refusals",
    "counter",
    "{request}",
    "Answers refused with 429, by why: queue_full, deadline (would be too late), waited (was), worker, no_worker.",
    ("model", "reason"),
)
RETRIES = Metric(
    "headroom.retries",
    "counter",
    "{request}",
    "Answers sent to another worker before their first token, by why: refused (a veto), lost (the worker died), gone.",
    ("model", "reason"),
)
PLACEMENTS = Metric("headroom.placements", "counter", "{placement}", "Answers given to a worker.", OF_MODEL)
PLACEMENT_PREFIX_TOKENS = Metric(
    "headroom.placement_prefix_tokens",
    "counter",
    "{token}",
    "Prompt tokens that were believed to be cached where an answer was placed.",
    OF_MODEL,
)
PROMPT_TOKENS = Metric(
    "headroom.prompt_tokens", "counter", "{token}", "Prompt tokens of started answers.", OF_MODEL
)
CACHED_TOKENS = Metric(
    "headroom.cached_tokens", "counter", "{token}", "Of those, tokens whose pages were reused.", OF_MODEL
)
GENERATED_TOKENS = Metric(
    "headroom.generated_tokens", "counter", "{token}", "Tokens that came from workers.", OF_MODEL
)
QUEUE_DURATION = Metric(
    "headroom.queue_duration",
    "histogram",
    "s",
    "From the queue's end to a worker, each time.",
    OF_MODEL,
    SECONDS,
)
TIME_TO_FIRST_TOKEN = Metric(
    "headroom.time_to_first_token", "histogram", "s", "From arrival to the first tokens.", OF_MODEL, SECONDS
)
INTER_TOKEN_LATENCY = Metric(
    "headroom.inter_token_latency",
    "histogram",
    "s",
    "Gap before each later token; tokens that came in one message share its gap evenly.",
    OF_MODEL,
    TOKEN_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "headroom.time_per_output_token",
    "histogram",
    "s",
    "Mean time between tokens of an answer, after its first message.",
    OF_MODEL,
    TOKEN_SECONDS,
)
REQUEST_DURATION = Metric(
    "headroom.request_duration", "histogram", "s", "From arrival to the end.", OF_MODEL, SECONDS
)
HTTP_DURATION = Metric(
    "http.server.request.duration",
    "histogram",
    "s",
    "HTTP requests from the first byte to the last one of the response.",
    ("http.request.method", "http.route", "http.response.status_code"),
    HTTP_SECONDS,
)
QUEUED = Metric("headroom.queued", "gauge", "{request}", "Answers waiting for a worker.", OF_MODEL)
OPEN = Metric("headroom.open", "gauge", "{request}", "Answers of this Router at workers.", OF_MODEL)
WORKERS = Metric("headroom.workers", "gauge", "{worker}", "Workers that reported lately.", OF_MODEL)
REPLICA_BOUNDS = Metric(
    "headroom.replica_bounds",
    "gauge",
    "{replica}",
    "Fewest (min) and most (max) workers that autoscaling may choose.",
    ("model", "bound"),
)
MODEL_INFO = Metric(
    "headroom.model_info",
    "gauge",
    "",
    "Always 1: the loaded model's facts.",
    ("model", "architecture", "dtype", "device", "layers", "experts"),
)
BUILD_INFO = Metric(
    "headroom.build_info", "gauge", "", "Always 1: what runs here.", ("version", "python", "ray")
)

COUNTED = (
    REQUESTS,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    GENERATED_TOKENS,
    QUEUE_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUEST_DURATION,
    HTTP_DURATION,
)
"""Told as things happen."""
ASKED = (
    REFUSALS,
    RETRIES,
    PLACEMENTS,
    PLACEMENT_PREFIX_TOKENS,
    QUEUED,
    OPEN,
    WORKERS,
    REPLICA_BOUNDS,
    MODEL_INFO,
    BUILD_INFO,
)
"""Asked for at a scrape."""
ROUTER_METRICS = (*COUNTED, INTER_TOKEN_LATENCY, *ASKED)

TABLE: tuple[Metric, ...] = (*ROUTER_METRICS, *(row.metric for row in WORKER_METRICS))
