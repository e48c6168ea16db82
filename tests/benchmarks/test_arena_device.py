"""The arena's benchmark on the CPU: chats of two turns, and the loads that a GPU runs at full size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from benchmarks.arena.chats import SecondTurn, computed_share, draw_turns, run_chats
from benchmarks.arena.loads import Bench, CompactionPlan, compact_under_load, restore_from_host, share_prefix
from benchmarks.arena_device import Sizes, measure_device
from benchmarks.report import Value
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
CONFIG = WorkerConfig(
    str(DEMO), device="cpu", num_threads=1, arena_bytes=192 << 20, host_tier_bytes=64 << 20, max_running=4,
    max_model_len=4096,
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    opened = Bench.open(CONFIG)
    yield opened
    opened.close()


def test_a_second_turn_computes_little_more_than_what_is_new() -> None:
    """With the demo model's real template, behind answers that think; a long one among them."""
    engine = NativeEngine(replace(CONFIG, host_tier_bytes=0))
    try:
        chats = run_chats(DEMO, engine, draw_turns(3, 0), max_tokens=200)
    finally:
        engine.close()
    assert min(chat.num_reasoning_chars for chat in chats) > 20
    assert max(chat.num_answer for chat in chats) == 200
    assert 1.0 <= computed_share([chat.as_given for chat in chats]) <= 1.1
    assert 1.0 <= computed_share([chat.without for chat in chats]) <= 1.1
    for turn in (turn for chat in chats for turn in (chat.as_given, chat.without)):
        assert 0 <= turn.num_computed - turn.num_new < 64
        assert turn.num_new < turn.num_prompt - 300


def test_the_share_is_of_sums() -> None:
    assert computed_share([SecondTurn(100, 50, 60), SecondTurn(200, 150, 180)]) == 240 / 200


def test_shared_prefixes_and_the_host_tier_are_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = share_prefix(bench, 256, 1)
    assert shared["prefix.ttft_ratio"] == shared["prefix.ttft_first_ms"] / shared["prefix.ttft_second_ms"]
    found = restore_from_host(bench, 256, 1)
    assert found["host.mismatches"] == 0
    assert found["host.pages_compared"] >= 256 // 64 + 1
    assert found["host.restored_mb"] > 0.5
    loads, load = count(), bench.arena.host.load

    def spoiled(group: str, slot: int, page: torch.Tensor) -> None:
        load(group, slot, page)
        page[7] = next(loads) % 256

    monkeypatch.setattr(bench.arena.host, "load", spoiled)
    assert restore_from_host(bench, 256, 1)["host.mismatches"] > 0


@pytest.mark.parametrize("sealed", [True, False])
def test_a_compaction_moves_what_it_should(bench: Bench, sealed: bool) -> None:
    before = bench.engine.arena_report()["moves"]
    found = compact_under_load(bench, 4, 256, CompactionPlan(4 << 20, 1 << 20, sealed), "c")
    moves = bench.engine.arena_report()["moves"]
    name = "beside_bytes" if sealed else "between_bytes"
    assert moves[name] - before[name] >= 0.8 * (4 << 20)
    assert found["c.moved_mb"] == pytest.approx((4 << 20) / 1e6, rel=0.1)
    assert found["c.steps"] >= 4


def test_every_part_is_measured_and_told_of_at_once() -> None:
    told: list[dict[str, Value]] = []
    sizes = Sizes(128, 192, 3, (16, 24), 2 << 20, 256, 1)
    parts = {"prefix", "host", "modes"}
    measure_device(CONFIG, sizes, parts, lambda row: told.append(dict(row)))
    assert len(told) == 6
    last = told[-1]
    assert not [name for name in last if name.endswith(".failed")]
    for name in ("prefix.ttft_ratio", "host.restore_ratio", "arena.throughput_ratio"):
        assert float(str(last[name])) > 0.0
    assert float(str(last["host.beside_restore_step_ms"])) > 0.0
