"""Expressions over the metrics table: a row of it is named by its constant or its name, never by hand, and every
selector keeps to what the dashboard's variables choose."""

from __future__ import annotations

from serve_app.telemetry.metric import WORKER_LABELS, Metric, exposed_labels, exposed_name
from serve_app.telemetry.worker_metrics import WORKER_METRICS

WINDOW = "$__rate_interval"
_WORKER = {row.metric.name.removeprefix("headroom.worker."): row.metric for row in WORKER_METRICS}


def worker(name: str) -> Metric:
    """The row ``headroom.worker.<name>``."""
    return _WORKER[name]


def of(metric: Metric, suffix: str = "", **only: str) -> str:
    """A selector of the chosen models and workers; ``only``: label=value besides."""
    labels = exposed_labels(metric)
    chosen = [f'{label}=~"${label}"' for label in WORKER_LABELS if label in labels]
    wanted = [f"{label}{value if value[0] in '=!' else '=' + quoted(value)}" for label, value in only.items()]
    return f"{exposed_name(metric)}{suffix}{{{','.join(['job=~' + quoted('$job'), *chosen, *wanted])}}}"


def quoted(text: str) -> str:
    """As a label's value is written."""
    return f'"{text}"'


def rate(metric: Metric, suffix: str = "", window: str = WINDOW, **only: str) -> str:
    """Of a counter, per second."""
    return f"rate({of(metric, suffix, **only)}[{window}])"


def total(expression: str, *by: str) -> str:
    """Summed, but for the labels ``by``."""
    return f"sum{' by (' + ', '.join(by) + ') ' if by else ''}({expression})"


def quantile(share: float, metric: Metric, *by: str, window: str = WINDOW, **only: str) -> str:
    """A quantile of a histogram."""
    inner = total(rate(metric, "_bucket", window, **only), *by, "le")
    return f"histogram_quantile({share:g}, {inner})"


def within(metric: Metric, bound: str, *, window: str = WINDOW) -> str:
    """The share of a histogram's values up to ``bound``, one of its buckets."""
    kept = total(rate(metric, "_bucket", window, le=bound))
    return f"{kept} / {total(rate(metric, '_count', window))}"


def share(part: str, whole: str, *by: str) -> str:
    """One sum over another."""
    return f"{total(part, *by)} / {total(whole, *by)}"
