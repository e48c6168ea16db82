"""What a row of the metrics table is, and under which name and labels Prometheus sees it."""

from __future__ import annotations

from dataclasses import dataclass

ROUTER_LABEL = "router"
"""On every figure of a Router's own: which Router's it is."""
WORKER_LABELS = ("model", "replica")
"""On every figure of a worker: its model, and Serve's name of it, as ``/admin/replicas`` shows it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: by OpenTelemetry's conventions: dotted, no unit in it, no ``_total``.
        kind: ``counter``, ``histogram`` or ``gauge``.
        unit: as in the unified code for units; what stands in braces is counted and is no unit.
        description: a sentence.
        labels: attributes, with few values each.
        buckets: a histogram's upper bounds.
    """

    name: str
    kind: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


def exposed_name(metric: Metric) -> str:
    """The name under which Prometheus sees a metric (a histogram's series add ``_bucket``, ``_sum``, ``_count``)."""
    name = metric.name.replace(".", "_")
    if metric.unit.endswith("}/s"):
        name += "_per_second"
    elif not metric.unit.startswith("{"):
        name += _SUFFIXES[metric.unit] if metric.unit else ""
    return name + "_total" if metric.kind == "counter" else name


def exposed_labels(metric: Metric) -> tuple[str, ...]:
    """Its labels there, in order; a histogram's buckets have ``le`` besides."""
    own = tuple(label.replace(".", "_") for label in metric.labels)
    return own if own[: len(WORKER_LABELS)] == WORKER_LABELS else (*own, ROUTER_LABEL)
