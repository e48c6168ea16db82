"""States what a benchmark measured: under which conditions, as a table on the screen and as JSON in a file.

A figure without its conditions is no figure, so every report names all of :class:`Conditions`::

    parser = report_parser(__doc__)
    options = parser.parse_args()
    conditions = Conditions(model="Qwen3-30B-A3B shape", weights="random", prompts="random ids", ...)
    publish(Report("decode", conditions, rows), options.json)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

Value = str | int | float | bool | None
NOT_APPLICABLE = "-"
"""For a condition that a benchmark does not have, said on purpose."""


def hardware() -> str:
    """The processor with its usable cores, and the GPUs if torch is loaded and sees any."""
    text = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    torch = sys.modules.get("torch")  # a benchmark that runs on a GPU has loaded it
    if torch is not None and torch.cuda.is_available():
        text += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return text


def commit() -> str:
    """The commit that is measured: what ``BENCHMARKS_COMMIT`` says (for a copy without its history), else the checked
    out one."""
    named = os.environ.get("BENCHMARKS_COMMIT", "").strip()
    if named:
        return named
    asked = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(
            asked, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which figures were measured; none may be empty.

    Attributes:
        model: name or shape.
        weights: ``trained`` or ``random``.
        prompts: real text or random ids, and whose.
        cache: ``cold`` or ``warm``, of prefixes and experts.
        batch: requests at once, or the range of it.
        context: tokens of a request, or the range.
        resident: experts resident per layer (K), or the range.
        hardware: what it ran on; by default this machine.
        commit: of this repository.
    """

    model: str
    weights: str
    prompts: str
    cache: str
    batch: str
    context: str
    resident: str
    hardware: str = field(default_factory=hardware)
    commit: str = field(default_factory=commit)

    def __post_init__(self) -> None:
        empty = [entry.name for entry in fields(self) if not getattr(self, entry.name).strip()]
        if empty:
            raise ValueError(f"conditions without a word: {', '.join(empty)} ({NOT_APPLICABLE!r} says: none)")


@dataclass(frozen=True, slots=True)
class Report:
    """One table. ``rows`` are figures by column name, all rows with the same columns; ``notes`` are sentences.

    Several rows are told apart by their first column, which then names their figures: ``<first>.<column>``. A row
    called ``all`` sums the others up; its figures have the plain names, and so have those of a single row, unless rows
    are ``named``.
    """

    name: str
    conditions: Conditions
    rows: tuple[Mapping[str, Value], ...]
    notes: tuple[str, ...] = ()
    named: bool = False

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"report {self.name!r} has no rows")
        for row in self.rows:
            if list(row) != list(self.rows[0]):
                raise ValueError(
                    f"report {self.name!r}: a row has columns {list(row)}, not {list(self.rows[0])}"
                )

    def as_text(self) -> str:
        """Conditions, table and notes."""
        head = list(self.rows[0])
        cells = [head, *[[_shown(row[name]) for name in head] for row in self.rows]]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        ]
        conditions = [f"  {name}: {value}" for name, value in asdict(self.conditions).items()]
        return "\n".join([self.name, *conditions, *lines, *self.notes])

    def figures(self) -> dict[str, float]:
        """Every number of the table by name. ValueError where two rows would share names."""
        found: dict[str, float] = {}
        label = next(iter(self.rows[0]))
        for row in self.rows:
            plain = (len(self.rows) == 1 and not self.named) or row[label] == "all"
            prefix = "" if plain else f"{row[label]}."
            for name, value in row.items():
                if isinstance(value, str) or value is None or (name == label and len(self.rows) > 1):
                    continue
                if prefix + name in found:
                    raise ValueError(f"report {self.name!r}: two rows are called {row[label]!r}")
                found[prefix + name] = value
        return found

    def as_json(self) -> str:
        """The same for programs, with the time of writing."""
        value = {
            "benchmark": self.name,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "conditions": asdict(self.conditions),
            "figures": self.figures(),
            "notes": list(self.notes),
        }
        return json.dumps(value, indent=2) + "\n"


def _shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return NOT_APPLICABLE if value is None else str(value)


def report_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that knows ``--json FILE``; the description is the first line of ``doc``."""
    parser = argparse.ArgumentParser(description=(doc or "").strip().split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def publish(report: Report, json_path: Path | None) -> None:
    """Prints the report and writes it to ``json_path`` if there is one."""
    print(report.as_text())
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(report.as_json())
