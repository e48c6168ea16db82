"""The dashboards and alert rules: valid, understandable, and of nothing but the metrics table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dashboards.__main__ import files, main
from serve_app.telemetry.metrics import HTTP_SECONDS, SECONDS, TABLE, TOKEN_SECONDS
from tests.dashboards.promql import (
    FOREIGN,
    VARIABLES,
    exposed_series,
    parsed,
    problems,
    result_labels,
    rows_in,
    selectors,
)

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
NAMES = ("serving", "memory", "experts")
NOT_SHOWN: dict[str, str] = {}
"""Rows of the table that no panel shows, and why."""
UNITS = {"s", "bytes", "Bps", "reqps", "ops", "cps", "short", "percentunit", "none"}
DASHBOARDS = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES}
PANELS = [
    pytest.param(panel, id=f"{name}-{panel['title']}-{panel['id']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
ALERTS = [pytest.param(rule, id=rule["alert"]) for rule in RULES["groups"][0]["rules"]]

SOURCE = {
    "type": "object",
    "required": ["type", "uid"],
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    "additionalProperties": False,
}
GRID = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "properties": {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    },
    "additionalProperties": False,
}
TARGET = {
    "type": "object",
    "required": ["refId", "datasource", "expr", "legendFormat", "range", "instant", "format"],
    "properties": {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "datasource": SOURCE,
        "expr": {"type": "string", "minLength": 1},
        "legendFormat": {"type": "string"},
        "format": {"enum": ["time_series", "table", "heatmap"]},
        "editorMode": {"const": "code"},
        "range": {"type": "boolean"},
        "instant": {"type": "boolean"},
    },
    "additionalProperties": False,
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos", "datasource", "fieldConfig", "options", "targets"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "stat", "heatmap", "table"]},
        "title": {"type": "string", "minLength": 3, "maxLength": 40},
        "description": {"type": "string", "minLength": 10},
        "gridPos": GRID,
        "datasource": SOURCE,
        "fieldConfig": {
            "type": "object",
            "required": ["defaults", "overrides"],
            "properties": {
                "defaults": {
                    "type": "object",
                    "required": ["unit"],
                    "properties": {
                        "unit": {"enum": sorted(UNITS)},
                        "min": {"type": "number"},
                        "max": {"type": "number"},
                        "custom": {"type": "object"},
                    },
                    "additionalProperties": False,
                },
                "overrides": {"type": "array", "maxItems": 0},
            },
            "additionalProperties": False,
        },
        "options": {"type": "object"},
        "targets": {"type": "array", "minItems": 1, "items": TARGET},
    },
    "additionalProperties": False,
}
ROW = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos", "collapsed", "panels"],
    "properties": {
        "id": {"type": "integer"},
        "type": {"const": "row"},
        "title": {"type": "string"},
        "gridPos": GRID,
        "collapsed": {"const": False},
        "panels": {"type": "array", "maxItems": 0},
    },
    "additionalProperties": False,
}
DASHBOARD = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "tags", "refresh"],
    "properties": {
        "uid": {"type": "string", "pattern": "^headroom-[a-z]+$", "maxLength": 40},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "tags": {"const": ["headroom"]},
        "panels": {"type": "array", "items": {"anyOf": [ROW, PANEL]}},
        "templating": {"type": "object", "required": ["list"]},
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_is_what_grafana_imports(name: str) -> None:
    dashboard = DASHBOARDS[name]
    jsonschema.validate(dashboard, DASHBOARD)
    assert dashboard["uid"] == f"headroom-{name}", "links and bookmarks hold on to it"
    assert not dashboard.get("id"), "an id is the importing Grafana's own"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & covered, f"{panel['title']} lies on another panel"
        covered |= cells


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_asks_for_source_job_model_and_worker(name: str) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARDS[name]["templating"]["list"]}
    assert list(variables)[:4] == ["datasource", "job", "model", "replica"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for label in ("job", "model", "replica"):
        query = variables[label]["query"]["query"]
        selector, wanted = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert wanted == label
        assert problems(selector) == []
        assert label in result_labels(selector)
        assert variables[label]["includeAll"]
        assert variables[label]["multi"]
    for chosen, bounds in (("first_token_s", SECONDS), ("token_s", TOKEN_SECONDS)):
        if name == "serving":
            values = [option["value"] for option in variables[chosen]["options"]]
            assert values == [repr(float(bound)) for bound in bounds], "what a bucket's bound is called"
            assert variables[chosen]["current"]["value"] in values
    text = json.dumps(DASHBOARDS[name]["panels"])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == set(variables), "no variable without a use, and none that is not there"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_and_asks_for_nothing_but_the_table(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    for target in panel["targets"]:
        assert problems(target["expr"]) == []
        labels = result_labels(target["expr"])
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert label in labels, f"the legend names {label}"
        if panel["type"] != "table":
            assert target["legendFormat"]
        told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | {"job", "instance", "model"}
        if panel["type"] != "table":
            assert labels <= told | {"le"}, "two series of one name could not be told apart"
        for selector, _ in selectors(parsed(target["expr"])):
            if selector.name not in FOREIGN:
                chosen = {matcher.name for matcher in selector.matchers.matchers}
                assert chosen >= {"job"} | ({"model", "replica"} & exposed_series()[selector.name][1])


def test_every_row_of_the_table_is_shown_or_said_not_to_be() -> None:
    shown: set[str] = set()
    for dashboard in DASHBOARDS.values():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                shown |= rows_in(target["expr"])
    rows = {metric.name for metric in TABLE}
    assert shown | set(NOT_SHOWN) == rows
    assert not shown & set(NOT_SHOWN)


def test_bounds_that_are_offered_are_buckets_by_the_names_prometheus_has() -> None:
    assert float(VARIABLES["$first_token_s"]) in SECONDS
    assert float(VARIABLES["$token_s"]) in TOKEN_SECONDS
    assert all(isinstance(bound, float) for bound in (*SECONDS, *TOKEN_SECONDS, *HTTP_SECONDS))


@pytest.mark.parametrize("rule", ALERTS)
def test_an_alert_can_fire_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert problems(rule["expr"]) == []
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "description"}
    labels = result_labels(rule["expr"])
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
    assert all(text.endswith(".") for text in rule["annotations"].values())


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in RULES["groups"][0]["rules"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"Headroom[A-Za-z]+", name) for name in names)


def test_the_files_are_what_the_programs_write(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in files().items():
        assert (FOLDER / name).read_text() == text, f"dashboards/{name}: run python -m dashboards"
    assert main(["--check"]) == 0
