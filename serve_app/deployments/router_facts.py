"""Reads what a Router's rows of the metrics table are asked for at a scrape, off its dispatchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from serve_app.deployments.dispatch import Dispatcher
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metric import Metric
from serve_app.telemetry.router_metrics import Reading

if TYPE_CHECKING:
    from serve_app.deployments.backend import ModelService


def router_facts(
    services: Sequence[ModelService], build: tuple[str, ...]
) -> Mapping[Metric, Callable[[], Reading]]:
    """A reading for each row of :data:`serve_app.telemetry.metrics.ASKED`."""

    def of_each(value: Callable[[Dispatcher], float]) -> Callable[[], Reading]:
        return lambda: [((s.model.name,), value(s.dispatcher)) for s in services]

    def by_reason(
        counts: Callable[[Dispatcher], Mapping[str, int]], reasons: Sequence[str]
    ) -> Callable[[], Reading]:
        return lambda: [
            ((s.model.name, reason), counts(s.dispatcher).get(reason, 0))
            for s in services
            for reason in reasons
        ]

    return {
        names.REFUSALS: by_reason(lambda d: d.counts.refusals, names.REFUSAL_REASONS),
        names.RETRIES: by_reason(lambda d: d.counts.retries, names.RETRY_REASONS),
        names.PLACEMENTS: of_each(lambda d: d.counts.placements),
        names.PLACEMENT_PREFIX_TOKENS: of_each(lambda d: d.counts.placement_prefix_tokens),
        names.QUEUED: of_each(lambda d: d.num_waiting),
        names.OPEN: of_each(lambda d: d.num_open),
        names.WORKERS: of_each(lambda d: len(d.live_reports())),
        names.REPLICA_BOUNDS: lambda: [
            ((s.model.name, bound), number)
            for s in services
            for bound, number in zip(("min", "max"), s.replica_bounds, strict=True)
        ],
        names.MODEL_INFO: lambda: _model_infos(services),
        names.BUILD_INFO: lambda: [(build, 1)],
    }


def _model_infos(services: Sequence[ModelService]) -> Reading:
    for service in services:
        info = service.dispatcher.model
        if info is not None:
            facts = (info.architecture, info.dtype, info.device, str(info.num_layers), str(info.num_experts))
            yield (service.model.name, *facts), 1
