"""The native engine with paged experts: what it says about them, the plan at start, the shared store, the check."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memory.api import StepCommands
from memory.device.host_region import remove_shared
from memory.device.residency import Lane
from memory.ledger.market import ExpertReading, Market
from tests.helpers.paging import ARENA_BYTES, record_steps, replay_steps, with_places
from tests.helpers.quantized import converted_folder
from tests.helpers.tiny import tiny_folder
from worker.api import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.errors import ConfigError, EngineDead
from worker.execution.runner import ModelRunner
from worker.experts import link
from worker.experts.identity import shared_name
from worker.experts.plan import floor_places, store_plan
from worker.models import paged


def settings(**options: Any) -> WorkerConfig:
    given: dict[str, Any] = {
        "model": str(tiny_folder()),
        "device": "cpu",
        "arena_bytes": ARENA_BYTES,
        "num_threads": 1,
        "experts": "paged",
        **options,
    }
    return WorkerConfig(**given)


def generate(engine: NativeEngine, num: int = 2, tokens: int = 8) -> list[TokenEvent]:
    async def one(n: int) -> TokenEvent:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(f"{n}", tuple(range(30 + n, 50 + n)), sampling))
        last = [event async for event in engine.stream(f"{n}")]
        return last[-1]

    async def every() -> list[TokenEvent]:
        return await asyncio.gather(*(one(n) for n in range(num)))

    return asyncio.run(every())


def test_the_snapshot_and_the_report_say_what_was_counted() -> None:
    with closing(NativeEngine(settings(), audit=True)) as engine:
        before = engine.snapshot()
        assert (before.expert_hits, before.expert_misses) == (0, 0)
        assert before.experts is not None
        assert not any(before.experts.bits)
        generate(engine)
        snapshot, report = engine.snapshot(), engine.expert_report()
    assert snapshot.experts is not None
    assert report is not None
    assert (snapshot.experts.num_layers, snapshot.experts.num_experts) == (4, 8)
    resident = int.from_bytes(snapshot.experts.bits, "little").bit_count()
    assert resident == sum(layer["resident"] for layer in report["layers"]) == snapshot.expert_misses
    assert snapshot.experts.generation > before.experts.generation
    assert snapshot.expert_bytes_paged == snapshot.expert_misses * snapshot.extra["expert_bytes"]
    assert report["hit_rate"] == snapshot.expert_hits / (snapshot.expert_hits + snapshot.expert_misses)
    # Two rows, two experts each, seven decode steps: at most so many distinct experts were looked up.
    for layer in report["layers"]:
        assert 7 * 2 <= layer["hit"] + layer["tee"] + layer["in_place"] <= 7 * 4
        assert layer["prefill_in_place"] + layer["prefill_hit"] >= 2
    assert snapshot.extra["expert_places"] > 32
    for lane in ("tee", "in_place", "prefill_in_place", "staged"):
        used = sum(layer[lane] for layer in report["layers"])
        assert snapshot.extra[f"expert_bytes.{lane}"] == used * snapshot.extra["expert_bytes"]
    assert snapshot.extra["expert_places_checked"] > 0


def test_resident_engines_report_no_experts() -> None:
    with closing(NativeEngine(settings(experts="resident"))) as engine:
        assert engine.expert_report() is None
        assert engine.snapshot().experts is None


def test_expert_bytes_fixes_the_number_of_places() -> None:
    size = 24576
    with closing(NativeEngine(settings(expert_bytes=5 * size + 100), audit=True)) as engine:
        generate(engine)
        snapshot, report = engine.snapshot(), engine.expert_report()
    assert snapshot.extra["expert_places"] == 5
    assert snapshot.extra["experts_resident"] <= 5
    assert snapshot.extra["expert_evictions"] > 0
    assert report is not None
    stalls = [layer["stall_s"] / (layer["tee"] + layer["in_place"]) for layer in report["layers"]]
    assert stalls == pytest.approx([stalls[0]] * 4), "each miss takes what its block takes over the link"
    assert stalls[0] > 0
    assert report["stall_s"] == pytest.approx(snapshot.extra["expert_stall_s"])


def test_the_plan_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), closing(NativeEngine(settings())):
        pass
    *lines, rate = [text for r in caplog.records if (text := r.getMessage()).startswith("experts: ")]
    assert re.fullmatch(
        r"experts: missing ones come at \d+\.\d GB/s here \(measured: 8 of 24576 bytes at once\)", rate
    )
    assert "32 of 24576 bytes; arena 8.4 MB" in lines[0]
    assert any("32 resident (100%)" in line and "tokens" in line for line in lines[1:])
    assert any("8 resident (25%)" in line for line in lines[1:])
    left = [float(line.split("): ")[1].split(" MB")[0]) for line in lines[1:]]
    assert left == sorted(left), "fewer experts, more room for requests"


def test_the_market_hears_of_ghosts_and_prices_a_miss_at_the_measured_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "gather_rate", lambda addresses, num_bytes: 24576e3 * len(addresses) / 8)
    asked: list[ExpertReading] = []
    step = Market.step

    def listening(self: Market, now_s: float, experts: ExpertReading, *others: Any) -> Any:
        asked.append(experts)
        return step(self, now_s, experts, *others)

    monkeypatch.setattr(Market, "step", listening)
    with closing(NativeEngine(settings(arena_bytes=500_000))) as engine:
        generate(engine, tokens=40)
        extra = engine.snapshot().extra
    assert {reading.miss_ms for reading in asked} == {1.0}, "24,576 bytes at 24,576,000 a second"
    assert (asked[-1].ghost_hits, asked[-1].num_ghosts) == (
        extra["expert_ghost_hits"],
        extra["expert_ghosts"],
    )
    assert 0 < asked[-1].ghost_hits < asked[-1].misses - asked[-1].staged
    assert asked[-1].staged == extra["expert_prefill_misses"]


def test_the_floor_reserves_context_first() -> None:
    assert floor_places(1000, 100, 10**6, 64) == 10
    assert floor_places(0, 100, 10**6, 64) == 64
    assert floor_places(0, 100, 4000, 64) == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_bytes": 100}, "less than one expert's place"),
        ({"expert_bytes": 1 << 24}, "does not fit the arena"),
        ({"model": str(tiny_folder("qwen3_5"))}, "no routed experts"),
        ({"host_store": "public"}, "host_store"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NativeEngine(settings(**options))


def test_a_store_that_the_machine_cannot_hold_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        paged, "pinnable_bytes", lambda: (1 << 19, "limited by half of the memory, under WSL2")
    )
    with pytest.raises(ConfigError, match=r"need 0\.00 GB of host memory.*WSL2"):
        NativeEngine(settings())
    assert store_plan(20 * 10**9, 10 * 10**9, "x", on_gpu=True)[1].startswith("the experts need 20.00 GB")
    assert store_plan(10**9, 2 * 10**9, "x", on_gpu=True) == (
        True,
        "host store: 1.00 GB, fully pinned; at most 2.00 GB (x)",
    )


@pytest.fixture
def shared() -> Iterator[WorkerConfig]:
    # The seed is part of the name: test runs beside each other must not share.
    folder = converted_folder("qwen3_moe", "int4")
    config = settings(model=str(folder), host_store="shared", seed=os.getpid())
    name = shared_name(config)
    assert name is not None
    remove_shared(name)
    yield config
    remove_shared(name)


def test_tensors_written_anew_between_the_samples_change_the_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    config = WorkerConfig(model=str(tmp_path), experts="paged", host_store="shared")
    weights.write_bytes(bytes(8 << 20))
    names = {shared_name(config)}
    with weights.open("r+b") as file:
        file.seek(300_000)  # samples lie at 0 and from 520 KB on
        file.write(b"another expert")
    names.add(shared_name(config))
    assert len(names) == 2
    assert shared_name(config) in names, "the same files have the same name"


def test_a_second_replica_takes_the_first_ones_store(
    shared: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ModelRunner(shared)
    assert first.pager is not None
    reads: list[str] = []
    from worker.quantization.int4 import Int4

    pack = Int4.pack
    monkeypatch.setattr(Int4, "pack", lambda *a: (reads.append("pack"), pack(*a))[1])
    second = ModelRunner(shared)
    assert second.pager is not None
    assert reads == []
    assert second.pager.host.is_filled
    assert torch.equal(second.pager.host.hashes, first.pager.host.hashes)
    other = replace(shared, model=str(converted_folder("qwen3_moe", "mxfp4")))
    assert shared_name(other) != shared_name(shared)
    steps = record_steps(shared, (1,), new_tokens=3)
    assert [r.token_ids.tolist() for r in replay_steps(second, steps, ARENA_BYTES)] == [
        s.result.token_ids.tolist() for s in steps
    ]


def test_a_place_that_changed_kills_the_replica_and_names_the_expert() -> None:
    """A bit flips in device memory: the trickle finds it within as many steps as there are places."""
    runner = ModelRunner(with_places(settings(), 24576, 6))
    steps = record_steps(with_places(settings(), 24576, 6), (1,), new_tokens=12)
    runner.attach_memory(runner.page_specs, ARENA_BYTES)
    assert runner.pager is not None
    for step in steps[:6]:
        runner.run(step.plan)
    owner = runner.pager.residency.owner
    place = int((owner >= 0).nonzero()[0])
    layer, expert = divmod(int(owner[place]), 8)
    runner.arena.grids["expert"][place, 4000] ^= 4
    with pytest.raises(EngineDead, match=rf"expert {expert} of layer {layer} "):
        for number in range(len(runner.arena.grids["expert"])):
            runner.pager.begin_step(1000 + number, StepCommands(1000 + number), 0)
            runner.pager.end_step()
            runner.pager.raise_if_corrupt()


def test_an_engine_whose_place_changed_dies() -> None:
    engine = NativeEngine(with_places(settings(), 24576, 6))
    with closing(engine):
        generate(engine, 1, 3)
        pager = engine._runner.pager  # type: ignore[attr-defined]
        # Every place is checked in every step, so that the next request meets the change.
        check = pager._check
        check._places_per_step, check._steps = (
            pager.residency.num_places,
            torch.arange(pager.residency.num_places),
        )
        place = int((pager.residency.owner >= 0).nonzero()[0])
        engine._runner.arena.grids["expert"][place, 0] ^= 1  # type: ignore[attr-defined]
        last = generate(engine, 1, 3)[0]
        assert last.finish_reason is FinishReason.ERROR
        assert "is not what was loaded" in last.error
        with pytest.raises(EngineDead):
            engine.check_health()


def test_prefill_leaves_the_decode_set_alone() -> None:
    """A long prompt touches every expert of every layer and pages none of them."""
    with closing(NativeEngine(with_places(settings(), 24576, 8), audit=True)) as engine:
        generate(engine, 1, 10)
        pager = engine._runner.pager  # type: ignore[attr-defined]
        held, tees = pager.residency.owner.clone(), int(pager.residency.counts[Lane.TEE].sum())
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        engine.submit(GenerateRequest("long", tuple(n % 200 + 20 for n in range(600)), sampling))

        async def rest() -> None:
            async for _ in engine.stream("long"):
                pass

        asyncio.run(rest())
        assert torch.equal(pager.residency.owner, held)
        assert int(pager.residency.counts[Lane.TEE].sum()) == tees
        assert int(pager.residency.counts[Lane.PREFILL_IN_PLACE].sum()) > 20


def test_an_engine_whose_tables_disagree_dies() -> None:
    engine = NativeEngine(with_places(settings(), 24576, 6), audit=True)
    with closing(engine):
        generate(engine, 1, 3)
        owner = engine._runner.pager.residency.owner  # type: ignore[attr-defined]
        owner[int((owner >= 0).nonzero()[0])] = 31
        last = generate(engine, 1, 3)[0]
        assert last.finish_reason is FinishReason.ERROR
        assert "expert places: " in last.error
