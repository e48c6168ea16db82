"""The overhead benchmark without a GPU: what it makes of the times that it is told, and that the replay reads it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import step_overhead
from benchmarks.gpu_engine import GpuBench
from benchmarks.replay.rates import read_rates
from benchmarks.replay.shapes import QWEN35_4B
from benchmarks.shapes import shape_folder, shape_geometry
from benchmarks.step_profile import Kernel
from worker.advise.formats import find_format

COPY, WEIGHTS, KV = 4.2e12, 3.2e12, 4.0e12
BASE_S, ROW_S, LAUNCH_S = 700e-6, 9e-6, 500e-6


class TimedBench(GpuBench):
    """Takes as long for a step as rates, a base and a time per row say."""

    @staticmethod
    def make() -> TimedBench:
        geometry = shape_geometry(shape_folder("qwen3.5-4b", "bf16"))
        step = SimpleNamespace(num_prompt=1, device_s=0.03)
        engine: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=1000))
        runner: Any = SimpleNamespace(claims=False)
        log: Any = SimpleNamespace(steps=[])
        bench = TimedBench(engine, runner, log, geometry, find_format("bf16"), 0.0, 0)
        log.steps = _Endless(step)
        return bench

    def step_s(self, rows: int, context: int) -> float:
        weights = self.geometry.dense_read_bytes(self.format) / WEIGHTS
        held = self.held_bytes(context + step_overhead.STEPS / 2, rows) / KV
        return weights + held + (BASE_S + ROW_S * rows if rows > 1 else LAUNCH_S)


class _Endless(list[Any]):
    """Steps that were logged, whoever clears them."""

    def __init__(self, step: Any) -> None:
        super().__init__([step] * 6)

    def clear(self) -> None:
        pass


def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    bench = TimedBench.make()
    weights_s = bench.geometry.dense_read_bytes(bench.format) / WEIGHTS
    attention_s = step_overhead.ROWS * step_overhead.LONG * bench.geometry.full_kv_bytes() / KV

    def kernels(_: GpuBench, rows: int, context: int, step_s: float) -> list[Kernel]:
        return []

    def seconds(found: list[Kernel], step_s: float, pattern: str = "", part: str = "") -> float:
        return attention_s if part == "attention" else weights_s

    monkeypatch.setattr(step_overhead, "run_prompts", lambda *_: None)
    monkeypatch.setattr(step_overhead, "decode_kernels", kernels)
    monkeypatch.setattr(step_overhead, "seconds_of", seconds)
    monkeypatch.setattr(
        step_overhead, "decode_step_s", lambda bench, rows, context: bench.step_s(rows, context)
    )
    return dict(step_overhead.measure(bench, COPY))


def test_the_line_over_the_rows_is_what_steps_take_beyond_what_they_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = timed(monkeypatch)
    assert figures["step_base_us"] == pytest.approx(1e6 * BASE_S)
    assert figures["step_row_us"] == pytest.approx(1e6 * ROW_S)
    assert figures["weight_bandwidth_share"] == pytest.approx(WEIGHTS / COPY)
    path = tmp_path / "step_overhead.json"
    path.write_text(json.dumps({"figures": figures}))
    rates = read_rates(path)
    assert rates.layer_s == pytest.approx(BASE_S / QWEN35_4B.num_layers)
    assert rates.row_s == pytest.approx(ROW_S)


def test_a_line_that_no_step_could_have_is_left_out() -> None:
    assert step_overhead.row_line({16: 3e-3, 32: 2e-3, 64: 1e-3}) == {}
    assert step_overhead.row_line({16: 1e-4, 32: 1e-3, 64: 3e-3}) == {}
    assert set(step_overhead.row_line({16: 2e-3, 32: 2.5e-3, 64: 3e-3})) == {"step_base_us", "step_row_us"}
