"""Reports name their conditions and hold together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import Conditions, Report, hardware, publish, report_parser

CONDITIONS = Conditions(
    model="tiny",
    weights="random",
    prompts="random ids",
    cache="cold",
    batch="1-4",
    context="64",
    resident="-",
)


def test_a_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        {"batch": 1, "tokens_per_s": 12.3456, "share": 0.5},
        {"batch": 4, "tokens_per_s": 40123.4, "share": None},
    )
    options = report_parser("Measures nothing.\n\nMore.").parse_args(
        ["--json", str(tmp_path / "new" / "r.json")]
    )
    publish(Report("decode", CONDITIONS, rows, ("A note.",)), options.json)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "decode"
    assert "  weights: random" in lines
    assert lines[-4:] == [
        "batch  tokens_per_s  share",
        "    1         12.35    0.5",
        "    4        40,123      -",
        "A note.",
    ]
    written = json.loads((tmp_path / "new" / "r.json").read_text())
    assert written["figures"] == {"1.tokens_per_s": 12.3456, "1.share": 0.5, "4.tokens_per_s": 40123.4}
    assert written["conditions"]["hardware"] == hardware()
    assert written["written"].endswith("+00:00")


def test_a_single_row_has_plain_names_unless_rows_are_named() -> None:
    row = {"case": "m.bf16.n64", "share": 0.5}
    assert Report("offline", CONDITIONS, (row,)).figures() == {"share": 0.5}
    assert Report("offline", CONDITIONS, (row,), named=True).figures() == {"m.bf16.n64.share": 0.5}


def test_conditions_must_all_be_said() -> None:
    with pytest.raises(ValueError, match="weights"):
        replace(CONDITIONS, weights=" ")


def test_rows_must_have_the_same_columns() -> None:
    with pytest.raises(ValueError, match="columns"):
        Report("decode", CONDITIONS, ({"a": 1}, {"b": 1}))
    with pytest.raises(ValueError, match="no rows"):
        Report("decode", CONDITIONS, ())


def test_the_hardware_names_its_cores() -> None:
    assert hardware().endswith("cores")
    assert len(hardware()) > len("2 cores")


def test_figures_have_names_of_their_own() -> None:
    single = Report("one", CONDITIONS, ({"batch": 1, "share": 0.5},))
    assert single.figures() == {"batch": 1, "share": 0.5}
    summed = Report("sum", CONDITIONS, ({"how": "alone", "share": 0.5}, {"how": "all", "share": 0.25}))
    assert summed.figures() == {"alone.share": 0.5, "share": 0.25}
    with pytest.raises(ValueError, match="two rows"):
        Report("twice", CONDITIONS, ({"a": 1, "b": 2}, {"a": 1, "b": 3})).figures()
