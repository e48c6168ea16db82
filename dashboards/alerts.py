"""What is worth waking somebody for, or telling them in the morning: alert rules over the metrics table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards.queries import worker
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metric import Metric, exposed_name


@dataclass(frozen=True, slots=True)
class Alert:
    """``lasts``: for how long ``expr`` must hold. ``severity``: ``page`` (clients suffer now) or ``ticket``."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    description: str


def _n(metric: Metric, suffix: str = "") -> str:
    return exposed_name(metric) + suffix


def _rate(metric: Metric, suffix: str = "", only: str = "", window: str = "5m") -> str:
    return f"rate({_n(metric, suffix)}{only}[{window}])"


FAILED = '{outcome=~"failed|expired"}'
_ENDED = f"sum by (model) ({_rate(names.REQUESTS)})"

ALERTS = (
    Alert(
        "HeadroomDown",
        f"absent({_n(names.WORKERS)})",
        "2m",
        "page",
        "No Router answers a scrape.",
        "Either nothing serves, or Prometheus does not reach /metrics.",
    ),
    Alert(
        "HeadroomNoWorkers",
        f"max by (model) ({_n(names.WORKERS)}) == 0 and"
        f' max by (model) ({_n(names.REPLICA_BOUNDS)}{{bound="min"}}) > 0',
        "2m",
        "page",
        "No worker of {{ $labels.model }} reports.",
        "Requests wait, and are refused after queue_timeout_s. Look at the workers' logs, and at their GPUs.",
    ),
    Alert(
        "HeadroomWorkersMissing",
        f'max by (model) ({_n(names.WORKERS)}) < max by (model) ({_n(names.REPLICA_BOUNDS)}{{bound="min"}})',
        "15m",
        "ticket",
        "Only {{ $value }} workers of {{ $labels.model }} report.",
        "Fewer than replicas, or min_replicas: one does not come up, or there is no GPU for it.",
    ),
    Alert(
        "HeadroomFailures",
        f"sum by (model) ({_rate(names.REQUESTS, only=FAILED)}) / {_ENDED} > 0.01",
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of the answers of {{ $labels.model }} fail.",
        "Workers die or stand still, or answers do not end within request_timeout_s.",
    ),
    Alert(
        "HeadroomRefusals",
        f"sum by (model) ({_rate(names.REFUSALS)}) / {_ENDED} > 0.05",
        "10m",
        "page",
        "{{ $value | humanizePercentage }} of the answers of {{ $labels.model }} are refused with 429.",
        "The load is more than the replicas carry: more of them, or a higher max_replicas.",
    ),
    Alert(
        "HeadroomSlowFirstToken",
        f"histogram_quantile(0.95, sum by (model, le) ({_rate(names.TIME_TO_FIRST_TOKEN, '_bucket')})) > 10",
        "10m",
        "ticket",
        "The first token of {{ $labels.model }} takes {{ $value | humanizeDuration }} (p95).",
        "See the queue, the wait at workers and the length of prompts; choose a bound that suits your promise.",
    ),
    Alert(
        "HeadroomSlowTokens",
        f"histogram_quantile(0.95, sum by (model, le) ({_rate(names.INTER_TOKEN_LATENCY, '_bucket')})) > 0.5",
        "10m",
        "ticket",
        "Tokens of {{ $labels.model }} are {{ $value | humanizeDuration }} apart (p95).",
        "Long prompts hold streams up (max_step_tokens), experts are missed, or batches are too large.",
    ),
    Alert(
        "HeadroomRetractions",
        f"1000 * sum by (model) ({_rate(worker('retractions'), window='15m')})"
        f" / sum by (model) ({_rate(worker('finished'), window='15m')}) > 50",
        "15m",
        "ticket",
        "{{ $value | humanize }} retractions per 1,000 answers of {{ $labels.model }}.",
        "Running requests outgrow memory: lower max_running, or add replicas.",
    ),
    Alert(
        "HeadroomMemoryShort",
        f"{_n(worker('available'))} / {_n(worker('arena'))} < 0.02 and {_n(worker('waiting'))} > 0",
        "10m",
        "ticket",
        "Worker {{ $labels.replica }} of {{ $labels.model }} has no memory left, and requests wait.",
        "See the arena by what it holds; requests of this length need more replicas.",
    ),
    Alert(
        "HeadroomWorkerSilent",
        f"{_n(worker('report_age'))} > 2",
        "1m",
        "ticket",
        "Worker {{ $labels.replica }} of {{ $labels.model }} reports late.",
        "Routers give it less and less; its process, or the way to it, is overloaded.",
    ),
    Alert(
        "HeadroomStandingStill",
        f"rate({_n(worker('steps'))}[5m]) == 0 and {_n(worker('running'))} > 0",
        "2m",
        "page",
        "Worker {{ $labels.replica }} of {{ $labels.model }} has requests and takes no steps.",
        "Its health check ends it after stall_timeout_s; if it does not, end the replica.",
    ),
    Alert(
        "HeadroomPlacementByOldNews",
        f"sum by (model) ({_rate(names.RETRIES)}) / sum by (model) ({_rate(names.PLACEMENTS)}) > 0.1",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of the placements of {{ $labels.model }} come to nothing.",
        "Workers veto or die. Where they veto, reports are late, or several Routers see little of each other.",
    ),
    Alert(
        "HeadroomLinkSaturated",
        f"{_rate(worker('link_busy'))} > 0.9",
        "15m",
        "ticket",
        "The link of worker {{ $labels.replica }} of {{ $labels.model }} is busy with missing experts.",
        "Decode steps wait for experts: fewer requests per worker, a smaller format, or a GPU with more memory.",
    ),
    Alert(
        "HeadroomSelfCheckStands",
        f"rate({_n(worker('expert_checks'))}[15m]) == 0 and rate({_n(worker('steps'))}[15m]) > 0",
        "15m",
        "ticket",
        "Worker {{ $labels.replica }} of {{ $labels.model }} does not check its experts.",
        "It steps, but no place has its turn: nothing would notice wrong bytes.",
    ),
)


def as_yaml(alerts: tuple[Alert, ...] = ALERTS) -> dict[str, Any]:
    """A file of Prometheus rules; ``spec`` of a PrometheusRule looks the same."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in alerts
    ]
    return {"groups": [{"name": "headroom", "rules": rules}]}
