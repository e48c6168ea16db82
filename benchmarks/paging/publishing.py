"""Writes what the paging benchmark has found so far, so that a run that is cut keeps what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paging.cases import COLUMNS, Measured, Row
from benchmarks.report import Conditions, Report

COMBINED: dict[str, Callable[[Sequence[float]], float]] = {
    "graph.eager_decode_steps": sum,
    "all_hit_over_resident": max,
}
"""Figures of a whole table that hold for the tables of several runs, and how."""
SAME = ("model", "weights", "context", "batch")
"""Conditions that runs must share to be one table."""


def report(all_found: Sequence[Measured], conditions: Conditions) -> Report:
    """One table: every case, and a row of what was found besides, of the first format."""
    summary: Row = {"case": "all", **all_found[0].summary}
    for name, combine in COMBINED.items():
        known = [found.summary.get(name) for found in all_found]
        values = [float(value) for value in known if isinstance(value, int | float)]
        if values:
            summary[name] = combine(values)
    columns = (*COLUMNS, *(name for name in summary if name not in COLUMNS))
    rows = [*(row for found in all_found for row in found.rows), summary]
    filled = tuple({name: row.get(name) for name in columns} for row in rows)
    return Report(
        "paged_decode", conditions, filled, tuple(note for found in all_found for note in found.notes)
    )


def write(found: Report, path: Path | None, earlier: Path | None = None) -> None:
    """Writes the figures to ``path``, if there is one, behind those of ``earlier``, an earlier run's file, if that is
    there: cases of other formats are kept. ValueError where the two were measured under different conditions."""
    if path is None:
        return
    text = found.as_json()
    if earlier is not None and earlier.is_file():
        text = merged(json.loads(earlier.read_text()), json.loads(text), found.conditions)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(text)
    whole.replace(path)  # a run that is cut while it writes leaves the file before


def same_table(before: Mapping[str, Any], conditions: Conditions) -> None:
    """ValueError where an earlier run's conditions are those of another table."""
    held = asdict(conditions)
    if other := [name for name in SAME if before[name] != held[name]]:
        raise ValueError(f"the earlier file was measured with another {', '.join(other)}")


def merged(before: Mapping[str, Any], after: Mapping[str, Any], conditions: Conditions) -> str:
    """The JSON of two runs' figures as one table's: the later one's win, but those of whole tables are combined."""
    same_table(before["conditions"], conditions)
    figures = {**before["figures"], **after["figures"]}
    for name, combine in COMBINED.items():
        values = [part["figures"][name] for part in (before, after) if name in part["figures"]]
        if values:
            figures[name] = combine(values)
    notes = [*before["notes"], *(note for note in after["notes"] if note not in before["notes"])]
    if before["conditions"]["commit"] != conditions.commit:
        notes.append(f"earlier cases were measured at commit {before['conditions']['commit']}")
    return json.dumps({**after, "figures": figures, "notes": notes}, indent=2) + "\n"
