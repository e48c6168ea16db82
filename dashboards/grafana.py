"""What a dashboard consists of, and how Grafana wants it written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what its series are called (``{{label}}`` stands for a label's value)."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: of a few words. ``description``: a sentence or two on how to read it.
        unit: Grafana's name of the values' unit.
        queries: what it shows.
        kind: ``timeseries``, ``stat``, ``heatmap`` or ``table``.
        width: of 24 columns. ``height``: in rows of the grid.
        stacked: whether series lie on top of each other, as parts of a whole do.
        most: upper end of the axis, for shares.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable with fixed values, of which the reader picks one."""

    name: str
    label: str
    values: tuple[str, ...]
    value: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. ``uid`` stays, so that links and bookmarks do. ``models_from``, ``replicas_from``: names of the
    series that the choices of models and workers are read from."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    models_from: str
    replicas_from: str
    choices: tuple[Choice, ...] = ()


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana imports it, by hand, from a file or from a labelled ConfigMap."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["headroom"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "Headroom",
                "tags": ["headroom"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": _variables(dashboard)},
        "panels": _placed(dashboard.rows),
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    models, replicas = dashboard.models_from, dashboard.replicas_from
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [
        {**source, "hide": 0, "refresh": 1, "regex": "", "multi": False, "includeAll": False},
        _labels("job", "Job", f"label_values({models}, job)"),
        _labels("model", "Model", f'label_values({models}{{job=~"$job"}}, model)'),
        _labels("replica", "Worker", f'label_values({replicas}{{job=~"$job",model=~"$model"}}, replica)'),
        *map(_choice, dashboard.choices),
    ]


def _labels(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "regex": "",
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "label": choice.label,
        "type": "custom",
        "query": ",".join(choice.values),
        "options": [{"text": v, "value": v, "selected": v == choice.value} for v in choice.values],
        "current": {"text": choice.value, "value": choice.value},
        "hide": 0,
        "multi": False,
        "includeAll": False,
    }


def _placed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All panels in reading order, each row from the left."""
    placed: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        grid = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        heading = {"id": len(placed) + 1, "type": "row", "title": row.title, "gridPos": grid}
        placed.append({**heading, "collapsed": False, "panels": []})
        top += 1
        left = line = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, line = top + line, 0, 0
            grid = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            placed.append({"id": len(placed) + 1, "gridPos": grid, **_panel(panel)})
            left, line = left + panel.width, max(line, panel.height)
        top += line
    return placed


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": panel.kind != "table",
                "instant": panel.kind == "table",
                "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind != "table":
        defaults["min"] = 0
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 60 if panel.stacked else 10,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "yAxis": {"unit": "s", "axisPlacement": "left"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": True},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}
