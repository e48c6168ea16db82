"""The one table of metric names, and the Router's instruments made from it.

Prometheus sees each name with dots as underscores, the unit behind it, and ``_total`` behind counters. Figures of
workers are taken from their last reports at the moment of a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from worker.api import WorkerSnapshot

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. ``kind``: counter, histogram or gauge; ``unit`` as in the unified code for units."""

    name: str
    kind: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS = Metric("headroom.requests", "counter", "", "Requests that ended.", ("model", "outcome"))
RETRIES = Metric("headroom.retries", "counter", "", "Requests sent to another worker.", ("reason",))
PROMPT_TOKENS = Metric(
    "headroom.prompt_tokens", "counter", "", "Prompt tokens of started requests.", ("model",)
)
GENERATED_TOKENS = Metric("headroom.generated_tokens", "counter", "", "Tokens sent to clients.", ("model",))
TIME_TO_FIRST_TOKEN = Metric(
    "headroom.time_to_first_token", "histogram", "s", "From arrival to the first tokens.", ("model",), SECONDS
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "headroom.time_per_output_token",
    "histogram",
    "s",
    "Mean time between tokens of a request, after its first message.",
    ("model",),
    TOKEN_SECONDS,
)
REQUEST_DURATION = Metric(
    "headroom.request_duration", "histogram", "s", "From arrival to the end.", ("model",), SECONDS
)
QUEUED = Metric("headroom.queued", "gauge", "", "Requests waiting in this router.")
OPEN = Metric("headroom.open", "gauge", "", "Requests of this router at workers.")
WORKERS = Metric("headroom.workers", "gauge", "", "Workers that reported lately.")

WORKER_GAUGES: Mapping[Metric, Callable[[WorkerSnapshot], float]] = {
    Metric("headroom.worker.running", "gauge", "", "Requests in the batch.", ("worker",)): lambda s: (
        s.num_running
    ),
    Metric("headroom.worker.waiting", "gauge", "", "Requests in the worker's queue.", ("worker",)): (
        lambda s: s.num_waiting
    ),
    Metric("headroom.worker.retraction_rate", "gauge", "", "Retractions per second.", ("worker",)): (
        lambda s: s.retraction_rate
    ),
    Metric("headroom.worker.step", "gauge", "s", "Mean length of recent steps.", ("worker",)): lambda s: (
        s.step_s
    ),
    Metric("headroom.worker.arena", "gauge", "By", "Size of the arena.", ("worker",)): (
        lambda s: s.headroom.arena_bytes
    ),
    Metric("headroom.worker.available", "gauge", "By", "Arena bytes that a grant could take.", ("worker",)): (
        lambda s: s.headroom.available_bytes
    ),
}

WORKER_COUNTERS: Mapping[Metric, Callable[[WorkerSnapshot], float]] = {
    Metric("headroom.worker.retractions", "counter", "", "Requests sent back.", ("worker",)): (
        lambda s: s.num_retractions
    ),
    Metric("headroom.worker.generated_tokens", "counter", "", "Tokens generated.", ("worker",)): (
        lambda s: s.generated_tokens
    ),
    Metric(
        "headroom.worker.cached_tokens", "counter", "", "Prompt tokens whose pages were reused.", ("worker",)
    ): (lambda s: s.cached_tokens),
    Metric("headroom.worker.expert_hits", "counter", "", "Expert uses served from the arena.", ("worker",)): (
        lambda s: s.expert_hits
    ),
    Metric(
        "headroom.worker.expert_misses", "counter", "", "Expert uses served from host memory.", ("worker",)
    ): (lambda s: s.expert_misses),
    Metric("headroom.worker.expert_paged", "counter", "By", "Bytes of experts brought in.", ("worker",)): (
        lambda s: s.expert_bytes_paged
    ),
}

WORKER_EXTRAS: Mapping[Metric, str] = {
    Metric(
        "headroom.worker.replayed_decode_steps", "counter", "", "Decode steps by CUDA graph.", ("worker",)
    ): ("graph.replayed_decode_steps"),
    Metric(
        "headroom.worker.eager_decode_steps", "counter", "", "Decode steps without a graph.", ("worker",)
    ): ("graph.eager_decode_steps"),
    Metric(
        "headroom.worker.replayed_mixed_steps", "counter", "", "Steps with prefill by graph.", ("worker",)
    ): ("graph.replayed_mixed_steps"),
    Metric("headroom.worker.eager_mixed_steps", "counter", "", "Such steps without a graph.", ("worker",)): (
        "graph.eager_mixed_steps"
    ),
    Metric("headroom.worker.expert_places", "gauge", "", "Places for experts in the arena.", ("worker",)): (
        "expert_places"
    ),
    Metric("headroom.worker.experts_resident", "gauge", "", "Experts that have a place.", ("worker",)): (
        "experts_resident"
    ),
    Metric(
        "headroom.worker.expert_evictions", "counter", "", "Experts that lost their place.", ("worker",)
    ): ("expert_evictions"),
    Metric(
        "headroom.worker.expert_ghosts", "gauge", "", "Experts whose place was lost lately.", ("worker",)
    ): ("expert_ghosts"),
    Metric("headroom.worker.expert_ghost_hits", "counter", "", "Misses of such experts.", ("worker",)): (
        "expert_ghost_hits"
    ),
    Metric(
        "headroom.worker.expert_in_place", "counter", "By", "Experts read from host memory.", ("worker",)
    ): ("expert_bytes_in_place"),
    Metric(
        "headroom.worker.expert_stall", "counter", "s", "The link busy with missing experts.", ("worker",)
    ): ("expert_stall_s"),
}
"""By the key in ``WorkerSnapshot.extra``. A worker that reports no such key has no series: no data is not zero."""

ROUTER_METRICS = (
    REQUESTS,
    RETRIES,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUEST_DURATION,
    QUEUED,
    OPEN,
    WORKERS,
)
TABLE = (*ROUTER_METRICS, *WORKER_GAUGES, *WORKER_COUNTERS, *WORKER_EXTRAS)


_UNITS = {"s": "_seconds", "By": "_bytes", "": ""}


def exposed_name(metric: Metric) -> str:
    """The name under which Prometheus sees a metric (a histogram's series add ``_bucket``, ``_sum``, ``_count``)."""
    name = metric.name.replace(".", "_") + _UNITS[metric.unit]
    return name + "_total" if metric.kind == "counter" else name


@dataclass(frozen=True)
class RouterFacts:
    """What the gauges ask for at a scrape."""

    num_queued: Callable[[], int]
    num_open: Callable[[], int]
    snapshots: Callable[[], Mapping[str, WorkerSnapshot]]
    retries: Callable[[], Mapping[str, int]]


class RouterMetrics:
    """The instruments of one Router, with a registry of their own."""

    def __init__(self, facts: RouterFacts) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._registry
        )
        views = [
            View(instrument_name=m.name, aggregation=ExplicitBucketHistogramAggregation(m.buckets))
            for m in TABLE
            if m.buckets
        ]
        self._provider = MeterProvider(metric_readers=[reader], views=views)
        meter = self._provider.get_meter("headroom")
        made: dict[str, Callable[..., Any]] = {
            "counter": meter.create_counter,
            "histogram": meter.create_histogram,
        }
        self._instruments: dict[Metric, Any] = {
            m: made[m.kind](m.name, unit=m.unit, description=m.description)
            for m in ROUTER_METRICS
            if m.kind in made and m is not RETRIES
        }
        for metric, read in self._observed(facts).items():
            create = (
                meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
            )
            create(metric.name, callbacks=[_callback(read)], unit=metric.unit, description=metric.description)

    def add(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds to a counter, or a value to a histogram; the labels must be those of the table."""
        if set(labels) != set(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
        instrument = self._instruments[metric]
        if metric.kind == "counter":
            instrument.add(value, labels)
        else:
            instrument.record(value, labels)

    def page(self) -> tuple[bytes, str]:
        """The Prometheus text page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    @staticmethod
    def _observed(facts: RouterFacts) -> dict[Metric, Callable[[], Iterable[Observation]]]:
        def of_workers(value: Callable[[WorkerSnapshot], float]) -> Callable[[], Iterable[Observation]]:
            return lambda: [Observation(value(s), {"worker": name}) for name, s in facts.snapshots().items()]

        observed: dict[Metric, Callable[[], Iterable[Observation]]] = {
            QUEUED: lambda: [Observation(facts.num_queued())],
            OPEN: lambda: [Observation(facts.num_open())],
            WORKERS: lambda: [Observation(len(facts.snapshots()))],
            RETRIES: lambda: [Observation(n, {"reason": reason}) for reason, n in facts.retries().items()],
        }
        for metric, value in (*WORKER_GAUGES.items(), *WORKER_COUNTERS.items()):
            observed[metric] = of_workers(value)
        for metric, key in WORKER_EXTRAS.items():
            observed[metric] = _extra(facts, key)
        return observed


def _extra(facts: RouterFacts, key: str) -> Callable[[], Iterable[Observation]]:
    return lambda: [
        Observation(s.extra[key], {"worker": name}) for name, s in facts.snapshots().items() if key in s.extra
    ]


def _callback(
    read: Callable[[], Iterable[Observation]],
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda options: read()
