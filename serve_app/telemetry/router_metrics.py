"""A Router's instruments, made from the metrics table: told of what happens, read by the page and by a push."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from serve_app.telemetry.metric import ROUTER_LABEL, Metric, exposed_name
from serve_app.telemetry.metrics import ASKED, COUNTED, INTER_TOKEN_LATENCY, ROUTER_METRICS
from serve_app.telemetry.page import Family, RouterFigures, label_text, number_text
from serve_app.telemetry.token_gaps import TokenGaps

Reading = Iterable[tuple[tuple[str, ...], float]]
"""Values by labels, in the order of the row."""
CLOSE_MS = 3_000


@dataclass(frozen=True)
class RouterFacts:
    """What the rows of ``ASKED`` are read from at a scrape, all of them."""

    read: Mapping[Metric, Callable[[], Reading]]


class RouterMetrics:
    """The instruments of one Router, with a registry of their own. Never the process's global ones: those are Serve's.

    Args:
        facts: where gauges come from.
        router: the Router's name.
        readers: further readers, e.g. one that pushes. ``resource``: what they say of this process.
    """

    def __init__(
        self,
        facts: RouterFacts,
        router: str = "",
        readers: Callable[[TokenGaps], Sequence[MetricReader]] = lambda gaps: (),
        resource: Resource | None = None,
    ) -> None:
        self.router = router
        self.gaps = TokenGaps(INTER_TOKEN_LATENCY)
        self._registry = CollectorRegistry()
        page = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._registry
        )
        views = [
            View(instrument_name=m.name, aggregation=ExplicitBucketHistogramAggregation(m.buckets))
            for m in COUNTED
            if m.buckets
        ]
        self._provider = MeterProvider(
            metric_readers=[page, *readers(self.gaps)],
            views=views,
            resource=resource or Resource.get_empty(),
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("headroom")
        made: dict[str, Callable[..., Any]] = {
            "counter": meter.create_counter,
            "histogram": meter.create_histogram,
        }
        self._instruments: dict[Metric, Any] = {
            m: made[m.kind](m.name, unit=m.unit, description=m.description) for m in COUNTED
        }
        for metric in ASKED:
            create = (
                meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
            )
            observe = observer(metric.labels, facts.read[metric])
            create(metric.name, callbacks=[observe], unit=metric.unit, description=metric.description)

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Adds to a counter, or a value to a histogram; ``labels`` in the order of the table."""
        instrument = self._instruments[metric]
        attributes = dict(zip(metric.labels, labels, strict=True))
        if metric.kind == "counter":
            instrument.add(value, attributes)
        else:
            instrument.record(value, attributes)

    def figures(self) -> RouterFigures:
        """All that this Router counted, for its own page or another's."""
        found = {family.name: family for family in map(self._family, self._registry.collect())}
        found[exposed_name(INTER_TOKEN_LATENCY)] = self.gaps.family(self.router)
        names = (exposed_name(metric) for metric in ROUTER_METRICS)
        return RouterFigures(self.router, tuple(found[name] for name in names if name in found))

    def close(self) -> None:
        """Pushes what is left, if there is somebody to push to; waits for it, but not for ever."""
        self._provider.shutdown(timeout_millis=CLOSE_MS)

    def _family(self, metric: Any) -> Family:
        # The client library cuts a counter's ending off its family's name, and keeps it on the samples.
        name = metric.name + "_total" if metric.type == "counter" else metric.name
        lines = []
        for sample in metric.samples:
            # The bucket's bound last, as the page's other histograms have it.
            named = {key: value for key, value in sample.labels.items() if key != "le"}
            named[ROUTER_LABEL] = self.router
            if (bound := sample.labels.get("le")) is not None:
                named["le"] = bound
            who = label_text(tuple(named), tuple(named.values()))
            lines.append(f"{sample.name}{{{who}}} {number_text(sample.value)}")
        return Family(name, metric.type, metric.documentation, lines)


def observer(
    labels: Sequence[str], read: Callable[[], Reading]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """A callback of the SDK for a row with these labels."""

    def observe(options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, dict(zip(labels, values, strict=True))) for values, value in read()]

    return observe
