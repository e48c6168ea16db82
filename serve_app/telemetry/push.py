"""Pushes metrics by OTLP, where the environment names a collector: each process its own, so that nothing counts twice.

A Router pushes what it counted, a worker what it reports. ``/metrics`` is served all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from serve_app.telemetry.metric import WORKER_LABELS
from serve_app.telemetry.otlp import OtlpSettings
from serve_app.telemetry.token_gaps import TokenGaps
from serve_app.telemetry.worker_metrics import WORKER_METRICS, WorkerMetric, WorkerState

CLOSE_MS = 3_000


def resource_of(settings: OtlpSettings, part: str, instance: str, version: str) -> Resource:
    """What pushed figures say of the process that they come from: ``part`` is ``router`` or ``worker``, ``instance``
    its name. ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` are heeded."""
    own = {"service.instance.id": instance, "service.version": version, "headroom.part": part}
    if settings.service_name:
        own["service.name"] = settings.service_name
    return Resource.create(own)


def push_reader(exporter: MetricExporter, gaps: TokenGaps | None = None) -> MetricReader:
    """Pushes every ``OTEL_METRIC_EXPORT_INTERVAL``, and once at the end; with ``gaps`` as one metric more."""
    return PeriodicExportingMetricReader(exporter if gaps is None else _WithGaps(exporter, gaps))


def otlp_exporter(settings: OtlpSettings) -> MetricExporter:
    """Sends to the collector that the environment names."""
    if settings.metrics_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


class WorkerPush:
    """A worker's instruments for a push. ``state`` answers its report now; it is asked once per push."""

    def __init__(
        self, state: Callable[[], WorkerState], readers: Sequence[MetricReader], resource: Resource
    ) -> None:
        self._state = state
        self._seen = state()
        self._provider = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("headroom")
        for row in WORKER_METRICS:
            metric = row.metric
            create = (
                meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
            )
            create(
                metric.name,
                callbacks=[self._observer(row)],
                unit=metric.unit,
                description=metric.description,
            )

    def close(self) -> None:
        """Pushes for the last time; waits for it, but not for ever."""
        self._provider.shutdown(timeout_millis=CLOSE_MS)

    def _observer(self, row: WorkerMetric) -> Callable[[CallbackOptions], list[Observation]]:
        own = row.metric.labels[len(WORKER_LABELS) :]

        def observe(options: CallbackOptions) -> list[Observation]:
            if row is WORKER_METRICS[0]:  # the SDK asks in order: the others read the same report
                self._seen = self._state()
            seen = self._seen
            who = dict(zip(WORKER_LABELS, (seen.model, seen.replica), strict=True))
            return [
                Observation(value, {**who, **dict(zip(own, labels, strict=True))})
                for labels, value in row.read(seen)
            ]

        return observe


class _WithGaps(MetricExporter):
    """An exporter that adds the token gaps to what the SDK collected."""

    def __init__(self, exporter: MetricExporter, gaps: TokenGaps) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self._gaps = gaps

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """See the base class."""
        data = self._gaps.data()
        if data.data.data_points and metrics_data.resource_metrics:
            first, *others = metrics_data.resource_metrics
            scope, *scopes = first.scope_metrics
            scope = replace(scope, metrics=[*scope.metrics, data])
            first = replace(first, scope_metrics=[scope, *scopes])
            metrics_data = MetricsData([first, *others])
        return self._exporter.export(metrics_data, timeout_millis)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """See the base class."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """See the base class."""
        self._exporter.shutdown(timeout_millis)
