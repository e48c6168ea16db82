"""The placement simulation: what it must conserve, and a small run of what it must show."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.placement import experiments
from benchmarks.placement.experts import Domain, ExpertCache, ExpertModel
from benchmarks.placement.figures import Objective, figures_of, max_share, quantile
from benchmarks.placement.routers import BASELINES, OURS, OURS_WITHOUT_EXPERTS
from benchmarks.placement.simulation import Fleet, Record, RunResult, Simulation
from benchmarks.placement.traces import SimRequest, TrafficSpec, drawn_requests, load_requests
from benchmarks.placement.workers import WorkerSpec

SMALL_MODEL = ExpertModel(
    num_layers=12, num_experts=64, experts_per_token=4, hot_experts=16, tokens_per_pool=24
)
SMALL = WorkerSpec(arena_bytes=3e9, expert_bytes=4e6, floor_places=96, max_running=24)
FLEET = Fleet(num_workers=4, staleness_s=0.5, worker=SMALL, model=SMALL_MODEL, num_domains=4)


def _chat(rng: Random) -> tuple[int, int]:
    return rng.randint(300, 1_500), rng.randint(20, 120)


@pytest.fixture(scope="module")
def requests() -> list[SimRequest]:
    return drawn_requests(500, 9.0, _chat, turns=8)


@pytest.mark.parametrize("rule", [*BASELINES, OURS])
def test_every_request_ends_and_every_token_is_given_back(rule: str, requests: list[SimRequest]) -> None:
    simulation = Simulation(requests[:150], FLEET, rule)
    result = simulation.run()
    assert all(
        record.finished_s >= record.first_token_s >= record.request.arrival_s for record in result.records
    )
    for worker in simulation._workers.values():
        assert worker.used_tokens == 0
        assert not worker.running
        assert not worker.waiting
    finished = sum(worker.generated_tokens for worker in simulation._workers.values()) + len(result.records)
    assert finished == sum(request.output_tokens for request in requests[:150])


def test_a_shortage_of_memory_retracts_and_still_finishes_everything() -> None:
    tight = replace(SMALL, kv_bytes_per_token=400_000.0)
    requests = drawn_requests(60, 20.0, lambda rng: (rng.randint(500, 900), rng.randint(200, 400)))
    result = Simulation(requests, replace(FLEET, worker=tight, num_workers=1), OURS).run()
    assert result.retractions > 0
    assert all(record.finished_s > 0 for record in result.records)


def test_ours_beats_the_baselines_on_conversations(requests: list[SimRequest]) -> None:
    def run(rule: str) -> tuple[float, float]:
        figures = figures_of(Simulation(requests, FLEET, rule).run(), 4, Objective(ttft_s=0.5, itl_s=0.05))
        return figures.goodput, figures.ttft_p99_ms

    goodput, p99 = run(OURS)
    others = [run(rule) for rule in BASELINES]
    assert goodput >= 0.98 * max(other[0] for other in others)
    assert p99 <= 0.9 * min(other[1] for other in others)


def test_the_expert_term_saves_a_quarter_of_the_bytes() -> None:
    requests = drawn_requests(
        300, 2.5, lambda rng: (rng.randint(60, 150), rng.randint(200, 400)), num_tenants=8
    )
    limited = replace(FLEET, worker=replace(SMALL, arena_bytes=1.4e9, link_bytes_per_s=1e10))
    with_term = Simulation(requests, limited, OURS).run().bytes_paged
    without = Simulation(requests, limited, OURS_WITHOUT_EXPERTS).run().bytes_paged
    assert with_term <= 0.75 * without


@pytest.mark.parametrize("staleness_s", [0.0, 0.5, 1.0])
def test_a_returning_worker_is_not_stampeded(staleness_s: float) -> None:
    requests = drawn_requests(500, 40.0, lambda rng: (rng.randint(100, 300), rng.randint(10, 30)))
    fleet = replace(FLEET, staleness_s=staleness_s, deaths_s=(2.0,), num_workers=6)
    figures = figures_of(Simulation(requests, fleet, OURS).run(), 6, Objective())
    assert 0.0 < figures.max_share_2s <= 2.5


def test_a_death_loses_only_streams_that_had_begun(requests: list[SimRequest]) -> None:
    result = Simulation(requests, replace(FLEET, deaths_s=(5.0, 12.0)), OURS).run()
    lost = [record for record in result.records if record.lost]
    retried = [record for record in result.records if record.num_retries]
    assert lost
    assert all(record.first_token_s >= 0 for record in lost)
    assert retried
    assert all(record.finished_s > 0 for record in result.records if not record.lost)


def test_a_cache_that_is_too_small_for_a_step_is_left_alone() -> None:
    cache = ExpertCache(Random(1), 64)
    cache.resize(8)
    assert cache.touch(0b1111) == 4
    assert cache.touch(0b1111) == 0
    assert cache.touch((1 << 20) - 1) == 16  # twenty at once do not fit: read in place, nothing evicted
    assert cache.resident == 0b1111
    for step in range(4, 20):
        cache.touch(1 << step | 0b11)
    assert cache.resident.bit_count() <= 8
    assert cache.touch(0b11) == 0  # used in every step


def test_a_domain_uses_its_hot_experts_as_often_as_it_says() -> None:
    domain = Domain(SMALL_MODEL, Random(1))
    hot = total = 0
    rng = Random(2)
    for _ in range(200):
        used = domain.decode_step(1, rng)
        assert used.bit_count() == SMALL_MODEL.num_layers * SMALL_MODEL.experts_per_token
        hot += (used & domain.hot).bit_count()
        total += used.bit_count()
    assert hot / total == pytest.approx(SMALL_MODEL.hot_share, abs=0.03)
    assert domain.chunk_share(4_096)[0] == pytest.approx(1.0)
    assert domain.chunk_share(1)[0] == pytest.approx(0.9 / 16 * 4, rel=0.15)


def test_traces_are_read_as_they_are_written(tmp_path: Path) -> None:
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.9799600,7,8\n"
    )
    (tmp_path / "azure_2023_code.csv.xz").write_bytes(lzma.compress(azure.encode()))
    first, second = load_requests(tmp_path, TrafficSpec("azure_2023_code", 10, 4.0))
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens, first.blocks) == (0.0, 4_808, 10, ())
    assert second.arrival_s == pytest.approx(0.5)
    lines = [
        {"timestamp": 0, "input_length": 1_300, "output_length": 5, "hash_ids": [0, 7, 8]},
        {"timestamp": 3_000, "input_length": 1_600, "output_length": 6, "hash_ids": [0, 7, 8, 9]},
        {"timestamp": 4_000, "input_length": 1_024, "output_length": 6, "hash_ids": [0, 11]},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "mooncake_synthetic.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    found = load_requests(tmp_path, TrafficSpec("mooncake_synthetic", 10, 1.0))
    # The last token never closes a block.
    assert [request.blocks for request in found] == [(0, 7), (0, 7, 8), (0,)]
    assert found[0].conversation == found[1].conversation != found[2].conversation
    assert found[0].tenant == found[1].tenant


def test_figures_by_hand() -> None:
    def record(number: int, first: float, finished: float, lost: bool = False) -> Record:
        request = SimRequest(number, float(number), 1_000, 11, (), "", "", 0)
        return Record(request, "a", float(number), number + first, number + finished, lost=lost)

    records = [record(0, 1.0, 2.0), record(1, 2.4, 3.0), record(2, 0.5, 4.5), record(4, 1.0, 1.5, lost=True)]
    result = RunResult(records, [(0.0, "a"), (1.0, "a"), (2.0, "a"), (3.0, "b")])
    figures = figures_of(result, 2, Objective(ttft_s=2.0, ttft_s_per_token=3e-4, itl_s=0.15))
    # The second was late with its first token, the third slow, the fourth lost.
    assert figures.goodput == pytest.approx(1 / 4)
    assert figures.imbalance == 1.5
    assert figures.lost == 1
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0


def test_the_share_is_of_two_seconds_with_enough_placements() -> None:
    even = [(i * 0.1, "ab"[i % 2]) for i in range(100)]
    assert max_share(even, 2) == pytest.approx(1.0, abs=0.1)
    assert max_share([*even, *[(10.0 + i * 0.01, "a") for i in range(40)]], 2) > 1.5
    assert max_share([(float(i), "a") for i in range(100)], 2) == 0.0


def test_statements_that_do_not_hold_are_named() -> None:
    figures = {"max_share_2s": 1.0, "four_domains.bytes_saved_share": 0.3}
    for spec in experiments.MATRIX:
        for staleness_s in experiments.STALENESS_S:
            figures[f"stampede.{staleness_s:g}.ours.max_share_2s"] = 2.0
            for figure, ours, best in (("goodput", 0.99, 1.0), ("ttft_p99_ms", 70.0, 100.0)):
                figures[f"{spec.trace}.{staleness_s:g}.ours.{figure}"] = ours
                figures[f"{spec.trace}.{staleness_s:g}.best_baseline.{figure}"] = best
    assert experiments.failed_statements(figures) == []
    for name, value in (
        ("azure_2023_conv.1.ours.goodput", 0.97),
        ("mooncake_synthetic.0.5.ours.ttft_p99_ms", 90.0),
        ("max_share_2s", 2.6),
        ("stampede.1.ours.max_share_2s", 2.6),
        ("four_domains.bytes_saved_share", 0.2),
    ):
        assert len(experiments.failed_statements(figures | {name: value})) == 1
