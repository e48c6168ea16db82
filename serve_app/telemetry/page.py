"""Writes the Prometheus page: families of samples from every Router of the application, and from every worker once.

A page is asked of one Router, and which one is chance. So it asks the others for theirs and answers for all; workers
report to every Router, and their figures come from the answering one alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.telemetry.metric import WORKER_LABELS, exposed_labels, exposed_name
from serve_app.telemetry.worker_metrics import WORKER_METRICS, WorkerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one name, as lines of the page."""

    name: str
    kind: str
    description: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """What one Router counted, for the page of another."""

    router: str
    families: tuple[Family, ...]


def label_text(names: Sequence[str], values: Sequence[object]) -> str:
    """``name="value"`` for each, with commas between."""
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in zip(names, values, strict=True))


def number_text(value: float) -> str:
    """A value as Prometheus reads it."""
    return repr(float(value)) if value == value and abs(value) != float("inf") else _not_finite(value)


def worker_families(workers: Iterable[WorkerState]) -> list[Family]:
    """The figures of workers; a family that no worker reports is left out."""
    states = [(state, label_text(WORKER_LABELS, (state.model, state.replica))) for state in workers]
    families = []
    for row in WORKER_METRICS:
        name, own = exposed_name(row.metric), exposed_labels(row.metric)[len(WORKER_LABELS) :]
        lines = [
            f"{name}{{{who}{',' + label_text(own, labels) if own else ''}}} {number_text(value)}"
            for state, who in states
            for labels, value in row.read(state)
        ]
        if lines:
            families.append(Family(name, row.metric.kind, row.metric.description, lines))
    return families


def page_of(routers: Iterable[RouterFigures], workers: Sequence[WorkerState]) -> bytes:
    """The whole page. A Router that is named twice counts once."""
    by_name: dict[str, list[Family]] = {}
    for figures in {figures.router: figures for figures in routers}.values():
        for family in figures.families:
            by_name.setdefault(family.name, []).append(family)
    for family in worker_families(workers):
        by_name.setdefault(family.name, []).append(family)
    parts: list[str] = []
    for name, families in by_name.items():
        parts += [f"# HELP {name} {families[0].description}", f"# TYPE {name} {families[0].kind}"]
        for family in families:
            parts += family.lines
    return "\n".join([*parts, ""]).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _not_finite(value: float) -> str:
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
