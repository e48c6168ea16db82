"""Tiles of the expert products come from a device's file where it lists the launch, else from the rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels._reference.experts import DENSE, FP8_BLOCK, INT4, MXFP4, BlockFormat
from kernels._triton import expert_tiles, experts
from kernels._triton.expert_tiles import Case, Entry, FewTiles, SingleTiles, Tiles, TileTable

FP8 = Case("fp8", 2048, 768)
ONE = Entry(FP8, 1, "single", SingleTiles(16, 6, 2), SingleTiles(2, 6), 12.0, 20.0)
FEW = Entry(FP8, 16, "few", FewTiles(64, 16, 4, 4), FewTiles(64, 16, 4, 6), 150.0, 160.0)
FILES = sorted((Path(expert_tiles.__file__).parent / "tiles").glob("*.json"))


def test_a_launch_finds_the_entry_of_the_next_number_of_tokens() -> None:
    table = TileTable([FEW, ONE])
    assert [table.find(FP8, tokens) for tokens in (1, 2, 16, 17)] == [ONE, FEW, FEW, None]
    assert table.find(Case("fp8", 2048, 512), 1) is None
    assert table.find(Case("int4", 2048, 768, 128), 1) is None


def test_a_table_survives_its_file() -> None:
    text = expert_tiles.write_table([FEW, ONE], device="D")
    assert expert_tiles.read_table(text).entries == [ONE, FEW]
    assert json.loads(text)["device"] == "D"


def spoiled(change: dict[str, Any], **tiles: Any) -> str:
    found = json.loads(expert_tiles.write_table([FEW]))
    found["entries"][0] |= change
    found["entries"][0]["gate_up"] |= tiles
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no json", "Expecting value"),
        ("{}", "no table of tiles"),
        ('{"entries": [3]}', "no table of tiles"),
        (spoiled({"kernel": "fast"}), "there is no kernel 'fast'"),
        (spoiled({"format": "fp4"}), "there is no format 'fp4'"),
        (spoiled({"surplus": 1}), "too much or too little"),
        (spoiled({"hidden": 2048.0}), "no size"),
        (spoiled({}, rows="64"), "rows='64' is no size"),
        (spoiled({}, depth=2), "no table of tiles"),
        (spoiled({}, rows=96), "powers of two"),
        (spoiled({}, num_stages=0), "below 1"),
        (spoiled({}, rows=32), "sixteen rows at least for a warp"),
        (spoiled({}, spans=3), "one span or two"),
        (spoiled({}, rows=256, num_stages=16), "more than shared memory"),
        (spoiled({"hidden": 2056}), "do not lie in whole pieces"),
        (spoiled({"format": "int4", "group": 96}), "not within groups of 96"),
        (spoiled({"kernel": "many"}), "no table of tiles"),
        (
            json.dumps({"entries": json.loads(expert_tiles.write_table([FEW, FEW]))["entries"]}),
            "listed twice",
        ),
    ],
)
def test_a_malformed_table_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        expert_tiles.read_table(text)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (replace(ONE, tokens=2), "serves one token"),
        (replace(ONE, gate_up=SingleTiles(64, 6, 2)), "16 rows or 32"),
        (replace(FEW, gate_up=Tiles(64, 128, 16, 4, 3)), "no tiles of a kernel"),
        (
            replace(FEW, kernel="many", gate_up=Tiles(64, 256, 16, 4, 3), down=Tiles(64, 128, 16, 4, 3)),
            "divide",
        ),
        (
            replace(FEW, kernel="many", gate_up=Tiles(64, 128, 8, 4, 3), down=Tiles(64, 128, 16, 4, 3)),
            "smaller",
        ),
    ],
)
def test_tiles_that_cannot_run_are_named(entry: Entry, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TileTable([entry])


@pytest.mark.parametrize("kind", [DENSE, FP8_BLOCK, INT4, MXFP4])
def test_the_rule_is_legal(kind: int) -> None:
    case = Case(expert_tiles.FORMATS[kind], 2048, 768, 128 if kind == INT4 else 0)
    entries = [Entry(case, 1, "one", *expert_tiles.ONE_RULE[kind], 0, 0)]
    entries += [
        Entry(case, tokens, "many", *expert_tiles.general_rule(kind, tokens, deterministic=same), 0, 0)
        for tokens in (4, 100)
        for same in (False, True)
        if kind != MXFP4  # whose weights are scaled one by one there: its tiles are wider than a group
    ]
    entries += [Entry(case, 256, "wide", *expert_tiles.wide_rule(2, per), 0, 0) for per in (8.0, 40.0, 200.0)]
    if kind != DENSE:
        entries.append(Entry(case, 8, "few", *expert_tiles.FEW_RULE[kind], 0, 0))
        entries.append(Entry(case, 1, "single", *expert_tiles.SINGLE_RULE, 0, 0))
    assert [expert_tiles.illegal(entry) for entry in entries] == [[]] * len(entries)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_tables_are_sound(path: Path) -> None:
    found = json.loads(path.read_text())
    assert path.name == expert_tiles.file_name(found["device"])
    table = expert_tiles.read_table(path.read_text())
    for case in {entry.case for entry in table.entries}:
        alone = [entry for entry in table.entries if entry.case == case and entry.tokens == 1]
        assert alone, f"{case}: a token by itself would take a few tokens' kernel"


def test_an_unlisted_device_has_an_empty_table_and_a_broken_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "__file__", str(tmp_path / "expert_tiles.py"))
    read = expert_tiles.table_of.__wrapped__
    assert read("Abacus 9000").entries == []
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / "Abacus_9000.json").write_text(expert_tiles.write_table([FEW]))
    assert read("Abacus 9000").entries == [FEW]
    (tmp_path / "tiles" / "Abacus_9000.json").write_text("{}")
    with pytest.raises(ValueError, match=r"Abacus_9000\.json: no table"):
        read("Abacus 9000")


def test_launches_take_what_is_listed_unless_they_are_deterministic() -> None:
    table = TileTable([FEW, ONE])
    block = BlockFormat(FP8_BLOCK, 0, 0)

    def chosen(tokens: int, dtype: torch.dtype = torch.bfloat16, inner: int = 768, same: bool = False) -> Any:
        x = torch.zeros(tokens, 2048, dtype=dtype)
        return experts.choose(x, 8, 128, block, inner, deterministic=same, measured=table)

    assert chosen(1) == ("single", ONE.gate_up, ONE.down)
    assert chosen(9) == ("few", FEW.gate_up, FEW.down)
    rule = ("few", *expert_tiles.FEW_RULE[FP8_BLOCK])
    assert chosen(17) == rule
    assert chosen(9, same=True) == rule
    assert chosen(1, same=True) == rule
    assert chosen(9, torch.float32) == rule
    assert chosen(9, inner=512) == rule
    assert chosen(1, inner=512) == ("one", *expert_tiles.ONE_RULE[FP8_BLOCK])
    sorted_by_group = BlockFormat(FP8_BLOCK, 0, 0, gate_order=0)  # which the listed kernel does not read
    x = torch.zeros(9, 2048, dtype=torch.bfloat16)
    assert experts.choose(x, 8, 128, sorted_by_group, 768, deterministic=False, measured=table)[0] == "many"
