"""The arena replay: its parts by hand-made figures, and on short loads what the arena promises against fixed splits."""

from __future__ import annotations

import json
import lzma
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay import cases, settling, sweep
from benchmarks.replay.cases import PUBLISHED_TOKENS_PER_S, published_cases
from benchmarks.replay.loads import Job, Load, fixed_clients, trace_beginning
from benchmarks.replay.rates import ASSUMED, read_rates
from benchmarks.replay.shapes import (
    GPT_OSS_20B,
    KIMI_LINEAR,
    QWEN3_30B_A3B,
    QWEN35_4B,
    QWEN35_35B_A3B,
    SHAPES,
)
from benchmarks.replay.simulator import Outcome, Replay, Setting
from benchmarks.replay.step_time import StepTime
from benchmarks.replay.sweep import calibrate, compare
from memory.api import PageKind, StepCommands
from memory.ledger.market import Market
from worker.advise.named import find_geometry
from worker.scheduling.step import StepPlan

GRAIN = 16


def mixed_load(num_jobs: int, seed: int = 0, longest: int = 6000) -> Load:
    """Prompts and outputs of very different lengths, all at once."""
    dice = random.Random(seed)
    jobs = []
    for number in range(num_jobs):
        prompt = max(64, int(longest * dice.random() ** 2)) // GRAIN
        output = dice.choice((64, 256, 1024)) // GRAIN
        jobs.append(Job(tuple(range(number * 10_000, number * 10_000 + prompt)), output, 2048 // GRAIN))
    return Load("mixed", tuple(jobs))


def run(setting: Setting, load: Load) -> Outcome:
    return Replay(setting, load).run()


@pytest.mark.parametrize("shape", [GPT_OSS_20B, QWEN35_35B_A3B], ids=lambda shape: shape.name)
def test_arena_is_not_below_the_best_split_and_above_the_median(shape) -> None:
    load = mixed_load(120)
    base = Setting(shape, 3_000_000_000, grain=GRAIN, max_running=128)
    splits = [run(replace(base, mode="split", ratio=ratio), load) for ratio in (0.1, 0.3, 0.5, 0.7, 0.9)]
    fit = sorted(split.tokens_per_s for split in splits if not split.refused)
    arena = run(base, load)
    assert arena.refused == 0
    assert arena.tokens_per_s >= 0.98 * fit[-1]
    assert arena.tokens_per_s > 1.02 * fit[len(fit) // 2]


def test_paged_experts_are_not_starved_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts over few bytes: taking in everybody would leave no expert its place."""
    load = fixed_clients("long", 12_288, (512, 512), 32, 32, GRAIN)
    base = Setting(QWEN3_30B_A3B, 16_000_000_000, grain=GRAIN, max_running=64)
    splits = [run(replace(base, mode="split", ratio=ratio), load).tokens_per_s for ratio in (0.3, 0.7)]
    arena = run(base, load).tokens_per_s
    # The first prompts come before anything is known of misses; on so short a load that shows.
    assert arena >= 0.93 * max(splits)
    monkeypatch.setattr(Market, "_pays", lambda *_: True)
    assert arena >= 1.15 * run(base, load).tokens_per_s


def test_everybody_ends_in_order_of_arrival_in_far_too_little_memory() -> None:
    """Outputs four times as long as the scheduler has learned to expect: retractions, yet nobody waits for ever."""
    short = [Job(tuple(range(n * 1000, n * 1000 + 64)), 16, 512) for n in range(40)]
    long = [Job(tuple(range(n * 1000, n * 1000 + 64)), 500, 512) for n in range(40, 56)]
    load = Load("storm", tuple(short + long))
    for mode in ("arena", "split"):
        replay = Replay(Setting(QWEN35_4B, 1_800_000_000, mode, 0.3, GRAIN, max_running=64), load)
        outcome = replay.run()
        assert len(replay.finished) == 56
        assert outcome.retractions > 0, "the case is not there"
        # Strictly first come, first served: prompts are alike, so first tokens come in order of arrival.
        assert replay.first_tokens() == sorted(replay.first_tokens(), key=int)


def test_throughput_returns_after_a_retraction_storm() -> None:
    figures = settling.throughput_after_storm(300, 96, 900, grain=GRAIN)
    assert figures["storm.retractions"] >= 20, "the case is not there"
    assert figures["storm.throughput_share_after"] >= 0.95


def test_expert_places_return_after_a_burst() -> None:
    figures = settling.places_after_burst(grain=GRAIN)
    assert figures["burst.places_least"] < 0.65 * figures["burst.places_before"], "the case is not there"
    assert figures["burst.places_share_after_30s"] >= 0.95


def test_bytes_seen_never_exceed_the_arena() -> None:
    outcome = run(Setting(KIMI_LINEAR, 2_000_000_000, grain=GRAIN, max_running=64), mixed_load(60))
    for kinds, gap in zip(outcome.trail.kinds, outcome.trail.gap, strict=True):
        assert sum(map(sum, kinds.values())) + gap <= 2_000_000_000
    assert max(sum(map(sum, kinds.values())) for kinds in outcome.trail.kinds) > 1_600_000_000
    assert 0 < sum(outcome.waiting_shares.values()) < 1


def test_a_request_that_fits_no_share_is_refused_and_counted() -> None:
    load = Load("long", (Job(tuple(range(1000)), 10, 10), Job(tuple(range(10)), 10, 10)))
    outcome = run(Setting(QWEN35_4B, 1_000_000_000, "split", 0.9, GRAIN), load)
    assert (outcome.refused, outcome.num_jobs) == (1, 1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("grain", [1, 8, 16])
def test_bytes_do_not_depend_on_the_grain(shape, grain: int) -> None:
    for spec in shape.specs(grain):
        if spec.kind is PageKind.FULL:
            assert spec.page_bytes == shape.page_tokens * shape.full_token_bytes
        if spec.kind is PageKind.WINDOW:
            assert spec.page_bytes == shape.window_page_tokens * shape.window_token_bytes
            assert spec.window * grain == shape.window


def plan_of(query_len: list[int], num_computed: list[int], samples: list[bool]) -> StepPlan:
    def ints(values):
        return np.array(values, dtype=np.int64)

    rows = ints(range(len(query_len)))
    flags = np.array(samples)
    tokens = ints([0] * sum(query_len))
    return StepPlan(
        0,
        rows,
        rows,
        ints(query_len),
        ints(num_computed),
        tokens,
        flags,
        query_len.count(1),
        {},
        StepCommands(0),
    )


def test_a_decode_step_costs_what_it_reads() -> None:
    """Two rows at 1,000 tokens of context: weights, KV and states over the bandwidth, plus launches."""
    priced = StepTime(QWEN35_4B, 1, 2048).price(plan_of([1, 1], [999, 999], [True, True]))
    read = 2 * (1000 * 32_768 + 2 * 51_511_296)
    launches = 32 * ASSUMED.layer_s
    assert priced.seconds == pytest.approx(8.411e9 / 3.0e12 + read / 3.0e12 + launches)
    coarse = StepTime(QWEN35_4B, 4, 2048).price(plan_of([1, 1], [249, 249], [True, True]))
    assert coarse.seconds == pytest.approx(4 * priced.seconds)


def test_a_long_prompt_costs_what_it_computes() -> None:
    priced = StepTime(QWEN35_4B, 1, 2048).price(plan_of([2048], [0], [True]))
    # The head is computed for the last token alone.
    flops = 2 * (3.570e9 * 2048 + 0.636e9) + 4 * 8 * 16 * 256 * 2048 * 1024
    assert priced.seconds == pytest.approx(
        flops / ASSUMED.flops_per_s + 2 * 51_511_296 / 3.0e12 + 32 * ASSUMED.layer_s
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_agree_with_the_models_geometry(shape) -> None:
    names = {
        "qwen35_4b": "qwen3.5-4b",
        "qwen35_35b_a3b": "qwen3.5-35b-a3b",
        "kimi_linear": "kimi-linear-48b-a3b",
    }
    geometry = find_geometry(names.get(shape.name, shape.name.replace("_", "-")))
    layers = sum(layer.matrix_params + layer.other_params for layer in geometry.layers)
    expert = geometry.expert.num_params + geometry.expert.num_bias_params if geometry.expert else 0
    routed = geometry.num_moe_layers * geometry.experts_per_token * expert
    assert shape.token_params == pytest.approx(layers + routed, rel=1e-3)
    assert shape.head_params == pytest.approx(geometry.head_params, rel=1e-3)
    assert shape.dense_bytes == pytest.approx(2 * (layers + geometry.head_params), rel=1e-3)
    assert shape.full_token_bytes == geometry.full_kv_bytes()
    assert shape.state_bytes == geometry.state_bytes
    assert shape.num_layers == len(geometry.layers)


def test_measured_rates_are_used_and_named(tmp_path: Path) -> None:
    path = tmp_path / "step_overhead.json"
    assert read_rates(path) == ASSUMED
    path.write_text(json.dumps({"figures": {"launch_us_per_layer": 90.0, "prefill_flops_share": 0.5}}))
    rates = read_rates(path)
    assert rates.layer_s == pytest.approx(90e-6)
    assert rates.flops_per_s == pytest.approx(395e12)
    assert rates.kv_bytes_per_s == ASSUMED.kv_bytes_per_s
    said = rates.described()
    assert said["layer_s"].endswith("(measured: launch_us_per_layer of step_overhead.json)")
    assert said["link_bytes_per_s"] == ASSUMED.described()["link_bytes_per_s"]
    plan = plan_of([1, 1], [999, 999], [True, True])
    slower = StepTime(QWEN35_4B, 1, 2048, rates).price(plan).seconds
    assert slower - StepTime(QWEN35_4B, 1, 2048).price(plan).seconds == pytest.approx(32 * 30e-6)
    path.write_text(json.dumps({"figures": {"launch_us_per_layer": 90.0, "weight_bandwidth_share": 0.5}}))
    both = read_rates(path)
    whole = 32 * both.layer_s + 8.411e9 / both.weight_bytes_per_s
    assert whole == pytest.approx(32 * 90e-6 + 8.411e9 / 4.2e12), "the step takes what was measured"
    figures = {"launch_us_per_layer": 90.0, "step_base_us": 640.0, "step_row_us": 7.0}
    path.write_text(json.dumps({"figures": figures}))
    rows = read_rates(path)
    slower = StepTime(QWEN35_4B, 1, 2048, rows).price(plan).seconds
    bare = StepTime(QWEN35_4B, 1, 2048, replace(ASSUMED, layer_s=0.0)).price(plan).seconds
    assert slower - bare == pytest.approx(640e-6 + 2 * 7e-6), "the line over the rows, not batch 1"
    path.write_text(json.dumps({"figures": {"attention_bandwidth_share": 1.01}}))
    assert read_rates(path).kv_bytes_per_s == pytest.approx(4.242e12), "reading is faster than copying"
    path.write_text(json.dumps({"figures": {"attention_bandwidth_share": 1.2}}))
    with pytest.raises(ValueError, match="attention_bandwidth_share"):
        read_rates(path)


def test_the_time_per_layer_is_the_one_that_shows_the_published_throughput(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ample = next(case for case in published_cases() if case.load_name == "1k_256")
    short = replace(ample, make_load=lambda: fixed_clients("c", 1024, (256, 256), 64, 96, ample.grain))
    monkeypatch.setattr(sweep, "published_cases", lambda: [short])
    found = sweep.calibrate_overhead(replace(ASSUMED, row_s=1e-6))
    assert 0 < found.layer_s < sweep.MOST_LAYER_S
    assert found.row_s == 0
    assert found.described()["layer_s"].endswith("tokens/s in ample memory)")
    shown = sweep.run_one(replace(short, rates=found), short.arena_bytes, "split", short.split_ratio)
    assert shown.tokens_per_s == pytest.approx(PUBLISHED_TOKENS_PER_S, rel=0.1)


def test_rates_reach_the_replay() -> None:
    load = fixed_clients("c", 1024, (256, 256), 4, 4, GRAIN)
    quick = run(Setting(QWEN35_4B, 2_000_000_000, grain=GRAIN), load)
    slow = run(Setting(QWEN35_4B, 2_000_000_000, grain=GRAIN, rates=replace(ASSUMED, layer_s=1e-3)), load)
    assert slow.tokens_per_s < 0.5 * quick.tokens_per_s


def test_missing_experts_cost_the_link() -> None:
    time = StepTime(QWEN3_30B_A3B, 1, 2048)
    plan = plan_of([1] * 8, [500] * 8, [True] * 8)
    resident, half = time.price(plan, 6144), time.price(plan, 3072)
    assert resident.misses == 0
    assert half.misses > 0
    link = half.misses * 4_720_128 / 50e9
    assert 0.5 * link < half.seconds - resident.seconds < link
    assert time.price(plan, 1000).misses > half.misses


def test_traces_are_read_from_their_beginning(tmp_path: Path) -> None:
    csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    csv += "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,3180,88\n"
    with lzma.open(tmp_path / "azure_2023_code.csv.xz", "wt") as file:
        file.write(csv)
    load = trace_beginning(tmp_path, "azure_2023_code", 9, 8, 2.0)
    assert [(len(job.prompt), job.output_tokens, job.max_tokens) for job in load.jobs] == [
        (601, 1, 11),
        (398, 11, 11),
    ]
    assert [job.arrival_s for job in load.jobs] == [0.0, 0.5]
    rows = '{"timestamp": 0, "input_length": 700, "output_length": 8, "hash_ids": [0, 7]}\n' * 2
    with lzma.open(tmp_path / "mooncake_conversation.jsonl.xz", "wt") as file:
        file.write(rows)
    load = trace_beginning(tmp_path, "mooncake_conversation", 1, 8, 1.0)
    assert load.jobs[0].prompt == (*range(64), *range(448, 448 + 24))
    with pytest.raises(FileNotFoundError, match="--traces"):
        trace_beginning(tmp_path, "azure_2023_conv", 1, 8, 1.0)


def test_the_budget_is_the_nearest_that_shows_the_published_figure() -> None:
    case = replace(
        cases.published_cases()[0],
        make_load=lambda: fixed_clients("c", 4096, (512, 512), 16, 16, GRAIN),
        arena_bytes=2_000_000_000,
        grain=GRAIN,
        target=cases.Target("peak_running", 7, 0.01),
    )
    arena_bytes, found = calibrate(case)
    assert found
    comparison = compare(case, arena_bytes, found, ratios=(0.2, 0.8))
    assert comparison.split.peak_running == 7
    assert comparison.figures()["running_ratio"] > 1.0
    impossible = replace(case, target=cases.Target("peak_running", 900))
    assert calibrate(impossible) == (2_000_000_000, False)
