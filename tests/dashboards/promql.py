"""Reads an expression and says what is wrong with it, measured against the metrics table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser as promql

from serve_app.telemetry.metric import Metric, exposed_labels, exposed_name
from serve_app.telemetry.metrics import TABLE

FOREIGN = {"ray_serve_autoscaling_desired_replicas": {"deployment", "application"}}
"""Series of Ray Serve that a panel shows where they are scraped; as its 2.60 names them."""
TARGET_LABELS = {"job", "instance"}
PARTS = {"_bucket", "_sum", "_count"}
VARIABLES = {"$__rate_interval": "5m", "$first_token_s": "2.0", "$token_s": "0.05"}


def exposed_series() -> dict[str, tuple[Metric, set[str]]]:
    """By name of a series: its row, and the labels it has."""
    series: dict[str, tuple[Metric, set[str]]] = {}
    for metric in TABLE:
        labels = set(exposed_labels(metric))
        if metric.kind == "histogram":
            for part in PARTS:
                series[exposed_name(metric) + part] = (
                    metric,
                    labels | ({"le"} if part == "_bucket" else set()),
                )
        else:
            series[exposed_name(metric)] = metric, labels
    return series


def parsed(text: str) -> Any:
    """The expression, Grafana's variables filled in. ValueError where it is no PromQL."""
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    return promql.parse(re.sub(r"\$\{?(job|model|replica)\}?", ".*", text))


def selectors(node: Any) -> Iterator[tuple[Any, bool]]:
    """Every selector under a node, and whether it is a range of one."""
    if isinstance(node, promql.VectorSelector):
        yield node, False
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector, True
    else:
        for child in children(node):
            yield from selectors(child)


def children(node: Any) -> list[Any]:
    """The expressions that one consists of."""
    if isinstance(node, promql.Call):
        return list(node.args)
    if isinstance(node, promql.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, promql.AggregateExpr | promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr):
        return [node.expr]
    if isinstance(node, promql.NumberLiteral | promql.StringLiteral):
        return []
    raise TypeError(f"{type(node).__name__} is not looked into")


def problems(text: str) -> list[str]:
    """What is wrong: unknown names and labels, counters without a rate, rates of gauges, labels that are gone."""
    series, found = exposed_series(), []
    node = parsed(text)
    for selector, is_range in selectors(node):
        if selector.name in FOREIGN:
            wanted = FOREIGN[selector.name]
        elif selector.name not in series:
            found.append(f"{selector.name} is not in the table")
            continue
        else:
            metric, wanted = series[selector.name]
            counts = metric.kind != "gauge"
            # absent() alone asks whether a series is there at all.
            if counts != is_range:
                found.append(f"{selector.name} is a {metric.kind}" + (" without a rate" if counts else ""))
        found += [
            f"{selector.name} has no label {matcher.name}"
            for matcher in selector.matchers.matchers
            if matcher.name not in wanted | TARGET_LABELS
        ]
    labels_of(node, series, found)
    return found


def labels_of(node: Any, series: Mapping[str, tuple[Metric, set[str]]], found: list[str]) -> set[str]:
    """The labels that the value of an expression has; tells of groupings by labels that are not there."""
    if isinstance(node, promql.VectorSelector | promql.MatrixSelector):
        selector = node if isinstance(node, promql.VectorSelector) else node.vector_selector
        known = FOREIGN.get(selector.name) or series.get(selector.name, (None, set()))[1]
        return known | TARGET_LABELS
    inner = [labels_of(child, series, found) for child in children(node)]
    if isinstance(node, promql.AggregateExpr):
        kept = set(node.modifier.labels) if node.modifier is not None else set()
        found += [f"grouped by {label}, which is not there" for label in kept - inner[-1]]
        return kept
    if isinstance(node, promql.BinaryExpr):
        vectors = [labels for labels, side in zip(inner, children(node), strict=True) if not _is_number(side)]
        if len(vectors) == 2 and vectors[0] != vectors[1] and node.modifier is None:
            found.append(f"sides of {node.op} have different labels: {sorted(vectors[0] ^ vectors[1])}")
        return vectors[0] if vectors else set()
    if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
        if "le" not in inner[-1]:
            found.append("a quantile of no buckets")
        return inner[-1] - {"le"}
    return inner[-1] if inner else set()


def _is_number(node: Any) -> bool:
    return not list(selectors(node))


def result_labels(text: str) -> set[str]:
    """The labels of an expression's value."""
    return labels_of(parsed(text), exposed_series(), [])


def rows_in(text: str) -> set[str]:
    """Names of the table's rows that an expression reads."""
    series = exposed_series()
    return {series[s.name][0].name for s, _ in selectors(parsed(text)) if s.name in series}
