"""Puts parts of an elastic run, measured apart on one kind of machine, into one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import Conditions, Report, Value

Row = dict[str, Value]


def merge_parts(parts: Sequence[Mapping[str, Any]]) -> Report:
    """One report of parts as they were written. ValueError where conditions differ in more than time, or where two
    parts have a figure each."""
    if not parts:
        raise ValueError("nothing to merge")
    conditions = Conditions(**parts[0]["conditions"])
    figures: dict[str, Value] = {}
    notes: list[str] = []
    for part in parts:
        differing = {
            name
            for name, value in part["conditions"].items()
            if name != "commit" and value != getattr(conditions, name)
        }
        if differing:
            raise ValueError(
                f"parts were measured under different conditions: {', '.join(sorted(differing))}"
            )
        for name, value in part["figures"].items():
            if name.endswith(".vs_best"):
                continue
            if name in figures:
                raise ValueError(f"{name} is in two parts")
            figures[name] = value
        notes += [note for note in part["notes"] if note not in notes]
    return Report("elastic", conditions, tuple(_rows(figures)), (*notes, f"merged of {len(parts)} parts"))


def _rows(figures: Mapping[str, Value]) -> list[Row]:
    found: dict[str, Row] = {}
    for name, value in figures.items():
        label, _, column = name.rpartition(".")
        found.setdefault(label or "all", {})[column] = value
    for row in found.values():
        rates = {name: value for name, value in row.items() if name[:1] == "k" and name[1:].isdigit()}
        best = max((float(value) for value in rates.values() if value is not None), default=0.0)
        if best and isinstance(row.get("elastic"), int | float):
            row["vs_best"] = float(row["elastic"] or 0) / best
    columns = list(dict.fromkeys(name for row in found.values() for name in row))
    return [{"phase": label, **{name: row.get(name) for name in columns}} for label, row in found.items()]
