"""Counts gaps between tokens into buckets, at a cost that each message of each stream can bear (a fraction of what an
instrument of the SDK takes), and states them for the page and for a push."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from opentelemetry.sdk.metrics.export import AggregationTemporality, HistogramDataPoint
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import Metric as MetricData

from serve_app.telemetry.metric import Metric, exposed_labels, exposed_name
from serve_app.telemetry.page import Family, label_text, number_text


class _Gaps:
    """Of one model; ``counts`` has one entry per bucket and one for what is above."""

    __slots__ = ("counts", "least_s", "most_s", "num", "total_s")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * (num_buckets + 1)
        self.num = 0
        self.total_s = 0.0
        self.least_s = float("inf")
        self.most_s = 0.0


class TokenGaps:
    """The histogram of one row of the table whose only label is the model."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._started_ns = time.time_ns()
        self._by_model: dict[str, _Gaps] = {}

    def came(self, model: str, num_tokens: int, gap_s: float) -> None:
        """So many tokens came together, ``gap_s`` after what came before."""
        gaps = self._by_model.get(model)
        if gaps is None:
            gaps = self._by_model[model] = _Gaps(len(self._metric.buckets))
        each_s = gap_s / num_tokens
        gaps.counts[bisect_left(self._metric.buckets, each_s)] += num_tokens
        gaps.num += num_tokens
        gaps.total_s += gap_s
        if each_s < gaps.least_s:
            gaps.least_s = each_s
        if each_s > gaps.most_s:
            gaps.most_s = each_s

    def family(self, router: str) -> Family:
        """For the page of that Router."""
        name, labels = exposed_name(self._metric), exposed_labels(self._metric)
        lines: list[str] = []
        for model, gaps in self._by_model.items():
            who = label_text(labels, (model, router))
            lines += bucket_lines(name, who, self._metric.buckets, gaps.counts)
            lines.append(f"{name}_count{{{who}}} {number_text(gaps.num)}")
            lines.append(f"{name}_sum{{{who}}} {number_text(gaps.total_s)}")
        return Family(name, self._metric.kind, self._metric.description, lines)

    def data(self) -> MetricData:
        """For a push: totals since the start. A push asks from a thread of its own, while tokens come: a point's count
        is that of its buckets."""
        now_ns = time.time_ns()
        points = []
        for model, gaps in list(self._by_model.items()):
            counts = list(gaps.counts)
            points.append(
                HistogramDataPoint(
                    attributes={"model": model},
                    start_time_unix_nano=self._started_ns,
                    time_unix_nano=now_ns,
                    count=sum(counts),
                    sum=gaps.total_s,
                    bucket_counts=counts,
                    explicit_bounds=list(self._metric.buckets),
                    min=gaps.least_s,
                    max=gaps.most_s,
                )
            )
        data = HistogramData(points, AggregationTemporality.CUMULATIVE)
        return MetricData(self._metric.name, self._metric.description, self._metric.unit, data)


def bucket_lines(name: str, who: str, bounds: Sequence[float], counts: Sequence[int]) -> list[str]:
    """The cumulative buckets of one histogram; ``counts`` has one entry more than ``bounds``."""
    lines, total = [], 0
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{who},le="{number_text(bound)}"}} {number_text(total)}')
    return lines
