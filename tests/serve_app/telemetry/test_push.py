"""Pushed metrics: each process its own, from the same table, and only where a collector is named."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)

from serve_app.config import otlp_settings
from serve_app.telemetry.metrics import ASKED, COUNTED, INTER_TOKEN_LATENCY, ROUTER_METRICS
from serve_app.telemetry.otlp import OtlpSettings
from serve_app.telemetry.push import WorkerPush, otlp_exporter, push_reader, resource_of
from serve_app.telemetry.router_metrics import RouterFacts, RouterMetrics
from serve_app.telemetry.worker_metrics import WORKER_METRICS
from tests.helpers.collector import collecting
from tests.serve_app.telemetry.workers import whole

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
NO_FACTS = RouterFacts({metric: (lambda m=metric: [(tuple("x" for _ in m.labels), 1)]) for metric in ASKED})


class Kept(MetricExporter):
    """Keeps what is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes: list[MetricsData] = []

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        self.pushes.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        return None


def by_name(data: MetricsData) -> dict[str, Any]:
    """Metrics of a push."""
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
    metrics = [metric for scope in scopes for metric in scope.metrics]
    assert len({metric.name for metric in metrics}) == len(metrics)
    return {metric.name: metric for metric in metrics}


def test_a_push_is_made_only_where_a_collector_is_named() -> None:
    assert not otlp_settings({}).pushes_metrics
    assert otlp_settings({ENDPOINT: "http://c:4318"}).pushes_metrics
    assert otlp_settings({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}).pushes_metrics
    assert not otlp_settings({ENDPOINT: ""}).pushes_metrics
    for off in ({"OTEL_SDK_DISABLED": "true"}, {"OTEL_METRICS_EXPORTER": "none"}):
        assert not otlp_settings({ENDPOINT: "http://c:4318", **off}).pushes_metrics


def test_the_standard_variables_choose_protocol_and_name() -> None:
    assert otlp_settings({}) == OtlpSettings(False, "http/protobuf", "http/protobuf", "headroom")
    grpc = otlp_settings({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert (grpc.metrics_protocol, grpc.traces_protocol) == ("grpc", "grpc")
    mixed = otlp_settings({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})
    assert (mixed.metrics_protocol, mixed.traces_protocol) == ("http/protobuf", "grpc")
    for named in ({"OTEL_SERVICE_NAME": "mine"}, {"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=mine"}):
        assert otlp_settings(named).service_name == ""


def test_a_router_pushes_its_own_rows_and_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    resource = resource_of(OtlpSettings(service_name="headroom"), "router", "r1", "1.0")
    made = RouterMetrics(NO_FACTS, "r1", lambda gaps: [push_reader(kept, gaps)], resource)
    for metric in COUNTED:
        made.add(metric, 1.0, *("x" for _ in metric.labels))
    made.gaps.came("m", 3, 0.3)
    made.close()
    [push] = kept.pushes
    metrics = by_name(push)
    assert set(metrics) == {metric.name for metric in ROUTER_METRICS}
    for metric in ROUTER_METRICS:
        assert (metrics[metric.name].unit, metrics[metric.name].description) == (
            metric.unit,
            metric.description,
        )
        assert set(metrics[metric.name].data.data_points[0].attributes) == set(metric.labels)
    [gaps] = metrics[INTER_TOKEN_LATENCY.name].data.data_points
    assert (gaps.count, gaps.sum, gaps.bucket_counts[INTER_TOKEN_LATENCY.buckets.index(0.1)]) == (3, 0.3, 3)
    told = push.resource_metrics[0].resource.attributes
    assert (told["service.name"], told["service.instance.id"], told["headroom.part"]) == (
        "headroom",
        "r1",
        "router",
    )


def test_a_worker_pushes_its_rows_from_one_report() -> None:
    asked = 0

    def state() -> Any:
        nonlocal asked
        asked += 1
        return whole("w9")

    reader = InMemoryMetricReader()
    push = WorkerPush(state, [reader], resource_of(OtlpSettings(), "worker", "w9", "1.0"))
    asked = 0
    data = reader.get_metrics_data()
    assert data is not None
    assert asked == 1, "all rows are of the same moment"
    metrics = by_name(data)
    assert set(metrics) == {row.metric.name for row in WORKER_METRICS}
    bands = {
        (point.attributes["group"], point.attributes["state"]): point.value
        for point in metrics["headroom.worker.band"].data.data_points
    }
    assert bands["full", "used"] == 5
    assert all(
        point.attributes["replica"] == "w9" and point.attributes["model"] == "m"
        for metric in metrics.values()
        for point in metric.data.data_points
    )
    push.close()


def test_otlp_reaches_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        settings = OtlpSettings(True)
        made = RouterMetrics(
            NO_FACTS,
            "r1",
            lambda gaps: [push_reader(otlp_exporter(settings), gaps)],
            resource_of(settings, "router", "r1", "1.0"),
        )
        made.gaps.came("m", 3, 0.3)
        made.close()
    [(part, names)] = collector.metrics().items()
    assert part == "router"
    assert names >= {"headroom.inter_token_latency", "headroom.build_info"}
