"""The search for tiles: in the interpreter with a timer that tells what it is told, so that only its choices count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import expert_tiles as tool
from benchmarks.expert_kernel import SHAPE
from kernels._triton.expert_tiles import Case, Entry, FewTiles, SingleTiles, illegal, read_table
from worker.quantization.base import ExpertShape

SMALL = ExpertShape(64, 64)
UP, OTHER_UP = FewTiles(512, 16, 4, 2), FewTiles(512, 16, 4, 2, 2, ahead=True)
DOWN, OTHER_DOWN = FewTiles(64, 16, 4, 2), FewTiles(64, 16, 4, 2, 2, ahead=True)
UNFIT, WRONG = FewTiles(96, 16, 4, 2), FewTiles(64, 16, 4, 3)
SINGLE = (SingleTiles(32, 2, 2), SingleTiles(64, 2))


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tool, "FEW_TOKENS", tool.Family("few", (UP, OTHER_UP, UNFIT), (DOWN, OTHER_DOWN, WRONG))
    )
    monkeypatch.setattr(tool, "ONE_TOKEN", tool.Family("single", SINGLE[:1], SINGLE[1:]))
    run = tool.run_kernel

    def spoiled(kernel: str, tiles: Any, inputs: Any) -> torch.Tensor:
        return run(kernel, tiles, inputs) * (1.5 if tiles[1] is WRONG else 1.0)

    monkeypatch.setattr(tool, "run_kernel", spoiled)
    rule = (replace(UP, num_stages=4), replace(DOWN, num_stages=4))
    monkeypatch.setattr(tool.Launch, "rule", lambda launch: ("few", rule))


class Timer:
    """Seconds by the pair of tiles that the launch was last run with; each is really run."""

    def __init__(self, seconds: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self._seconds = seconds
        self.timed: list[Any] = []
        monkeypatch.setattr(tool.Launch, "run_all", lambda launch, kernel, tiles: self.timed.append(tiles))

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return self._seconds(self.timed[-1])


def launches(*tokens: int, names: tuple[str, ...] = ("fp8",)) -> list[tool.Launch]:
    return list(tool.launches_of(names, tokens, SMALL, 4, 2, "cpu", routings=1))


def test_the_fastest_that_agrees_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    speed = {
        id(SINGLE[0]): 3.0,
        id(UP): 5.0,
        id(OTHER_UP): 4.0,
        id(DOWN): 2.0,
        id(OTHER_DOWN): 1.0,
        id(WRONG): 0.0,
    }
    timer = Timer(lambda tiles: sum(speed.get(id(one), 9.0) for one in tiles) / 1e6, monkeypatch)
    search, path = tool.Search(timer, 1.0, lambda: 0.0), tmp_path / "tiles.json"

    def write(entries: Sequence[Entry]) -> None:
        path.write_text(tool.write_table(entries))

    found = tool.tune(search, launches(2, 1), write)
    assert [(entry.tokens, entry.kernel, entry.gate_up, entry.down) for entry in found] == [
        (2, "few", OTHER_UP, OTHER_DOWN),
        (1, "single", *SINGLE),
    ]
    assert (found[0].us, found[0].rule_us) == pytest.approx((5.0, 18.0))
    assert timer.timed[:4] == [launches(2)[0].rule()[1], (UP, DOWN), (OTHER_UP, DOWN), (OTHER_UP, OTHER_DOWN)]
    assert len(search.failed) == 2
    assert "powers of two" in search.failed[0]
    assert "differs by 5.0e-01" in search.failed[1]
    assert sorted(entry.tokens for entry in read_table(path.read_text()).entries) == [1, 2]


def test_the_program_writes_a_file_that_the_kernels_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = launches(1)
    monkeypatch.setattr(tool, "launches_of", lambda *_: there)
    monkeypatch.setattr(tool, "graph_s", lambda run: 16e-6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Abacus 9000")
    path = tmp_path / "tiles.json"
    tool.main(["--json", str(path), "--formats", "fp8", "--batches", "1"])
    (entry,) = read_table(path.read_text()).entries
    assert (entry.us, entry.rule_us) == (1.0, 1.0)
    assert "kernels/_triton/tiles/Abacus_9000.json" in capsys.readouterr().out
    tool.main(["--compile", "0/2", "--formats", "fp8", "--batches", "1"])
    assert "1 candidates run, 0 left out" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main([])


def test_nothing_is_tried_past_the_deadline_and_the_rule_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    search = tool.Search(Timer(lambda tiles: 1e-6, monkeypatch), 0.0, lambda: 1.0)
    written: list[int] = []
    (entry,) = tool.tune(search, launches(2), lambda entries: written.append(len(entries)))
    assert (entry.gate_up, entry.us) == (replace(UP, num_stages=4), pytest.approx(1.0))
    assert written == [0], "a file without one token's entry sends it to a few tokens' kernel"


def test_parts_share_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    search = tool.Search(lambda run: 0.0, 0.0)
    monkeypatch.setattr(search, "check", lambda launch, kernel, tiles: checked.append((kernel, tiles)))
    total = sum(tool.compile_part(search, launches(1, 2), part, 3) for part in range(3))
    assert total == len(checked) == len(set(checked)) + 1, "only the rule's choice is there for each launch"
    assert {(UP, DOWN), (OTHER_UP, DOWN), (UP, OTHER_DOWN), SINGLE} <= {tiles for _, tiles in checked}


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_other_formats_mean_what_their_blocks_mean(name: str) -> None:
    (launch,) = launches(2, names=(name,))
    assert tool.Search(lambda run: 0.0, 0.0).check(launch, "few", (UP, DOWN))


def test_what_ships_as_candidates_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, group in (("fp8", 0), ("int4", 128), ("mxfp4", 0)):
        for tokens in (1, 16):
            case = Case(name, SHAPE.hidden_size, SHAPE.intermediate_size, group)
            for kernel, tiles in tool.candidates(tokens):
                assert illegal(Entry(case, tokens, kernel, *tiles, 0.0, 0.0)) == []
