"""Prefill under paging: shared passes through a ring, decode steps in between, and the bits of residency."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from memory.device.rescue import Rescuer
from memory.device.residency import BANNED, Lane
from tests.helpers.fake_runner import full_spec, window_spec
from tests.helpers.paging import replay_steps, same_results
from tests.helpers.quantized import converted_folder
from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.prefill_pass import LayerPace
from worker.execution.runner import ModelRunner
from worker.experts import pass_ring
from worker.experts.pager import ExpertPager
from worker.experts.pass_ring import PassRing
from worker.experts.passes import PassFacts, plan_passes, priced_tokens, tokens_in_windows
from worker.models.paged import table_experts
from worker.scheduling.limits import MIXED_TOKENS
from worker.scheduling.recording import RecordedStep

ARENA = 1 << 21
PASS = 160
FORMATS = ("unquantized", "fp8_block", "int4", "mxfp4")


def settings(format: str = "int4", **options: int | bool | str) -> WorkerConfig:
    base = WorkerConfig(
        model=str(converted_folder("qwen3_5_moe", format)),
        device="cpu",
        arena_bytes=ARENA,
        num_threads=1,
        experts="paged",
        pass_tokens=PASS,
        max_step_tokens=32,
    )
    return replace(base, **options)  # type: ignore[arg-type]


def few_places(config: WorkerConfig) -> WorkerConfig:
    """With places for a quarter of the experts, so that passes need a ring."""
    runner = ModelRunner(replace(config, expert_bytes=1 << 20))
    assert runner.pager is not None
    return replace(config, expert_bytes=8 * runner.pager.host.place_bytes)


def serve(
    config: WorkerConfig, prompts: Sequence[Sequence[int]], tokens: int = 24
) -> tuple[list[RecordedStep], NativeEngine, ExpertPager]:
    """Two streams begin; when they have tokens, ``prompts`` come at once. Answers the steps in order of their ends."""
    steps: list[RecordedStep] = []
    engine = NativeEngine(config, audit=True, record=lambda p, r: steps.append(RecordedStep(p, r)))
    pager = engine._runner.pager
    assert pager is not None

    async def one(name: str, prompt: Sequence[int], many: int, started: asyncio.Event | None = None) -> None:
        sampling = SamplingParams(
            max_tokens=many, temperature=0.7, seed=len(prompt), logprobs=3, ignore_eos=True
        )
        engine.submit(GenerateRequest(name, tuple(prompt), sampling))
        async for event in engine.stream(name):
            if started is not None and event.num_generated >= 3:
                started.set()

    async def every() -> None:
        started = asyncio.Event()
        streams = [
            asyncio.create_task(one(f"s{n}", range(20 + n, 28 + n), tokens, started)) for n in range(2)
        ]
        await started.wait()
        await asyncio.gather(*streams, *(one(f"p{n}", p, 4) for n, p in enumerate(prompts)))

    try:
        asyncio.run(every())
    finally:
        engine.close()
    return steps, engine, pager


def long_prompts(count: int, length: int = 90) -> list[list[int]]:
    return [[(n * 37 + i * 11) % 230 + 20 for i in range(length + 3 * n)] for n in range(count)]


def passes_have_the_bits_of_residency(
    config: WorkerConfig, tokens: int = 24
) -> tuple[list[RecordedStep], ExpertPager]:
    """Serves prompts by passes beside streams, and replays it with everything resident."""
    steps, _, pager = serve(few_places(config), long_prompts(3), tokens)
    passes = [step for step in steps if step.plan.staged]
    assert any(step.plan.ring is not None for step in passes)
    assert all(step.plan.num_tokens <= PASS for step in passes)
    assert max(step.plan.num_rows for step in passes) >= 2, "no two prompts shared a pass"
    ordered = sorted(steps, key=lambda step: step.plan.step)
    resident = ModelRunner(replace(config, experts="resident", pass_tokens=0, expert_bytes=0), table_experts)
    want = replay_steps(resident, ordered, ARENA)
    assert same_results(want, [step.result for step in ordered])
    return steps, pager


def steps_beside_passes(steps: Sequence[RecordedStep]) -> list[list[RecordedStep]]:
    """Steps, in order of their ends: for each pass those that began behind it and ended before it."""
    return [
        [other for other in steps[:at] if other.plan.step > step.plan.step]
        for at, step in enumerate(steps)
        if step.plan.staged
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_passes_give_the_bits_of_residency(format: str) -> None:
    passes_have_the_bits_of_residency(settings(format))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_passes_give_the_bits_of_residency_on_a_gpu(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step in flight, graphs, and the ring filled on a stream of its own."""
    monkeypatch.setattr(LayerPace, "layers", lambda *_: 1)
    config = settings(format, device="cuda", dtype="bfloat16", max_running=8)
    steps, pager = passes_have_the_bits_of_residency(config, tokens=200)
    assert max(len(beside) for beside in steps_beside_passes(steps)) > 1, "streams waited for the passes"
    assert (pager.residency.counts[Lane.STAGED].cpu() > 0).all(), (
        "a layer's experts did not come through the ring"
    )


def test_running_streams_go_on_while_a_pass_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPace, "layers", lambda *_: 1)
    steps, _, _ = serve(settings(), long_prompts(3))
    decoded = max(steps_beside_passes(steps), key=len)
    assert all(not s.plan.staged and (s.plan.query_len == 1).all() for s in decoded if s.plan.num_rows)
    assert len(decoded) >= 2, "a pass of four layers let fewer steps through"


def test_the_ring_brings_what_is_missing_and_is_given_back() -> None:
    steps, _, pager = serve(few_places(settings()), long_prompts(2))
    first = next(step for step in steps if step.plan.staged and step.plan.num_tokens >= 32)
    assert first.plan.ring is not None, "a quarter of the experts is resident at most"
    assert (pager.residency.counts[Lane.STAGED] > 0).all(), "a layer's experts did not come through the ring"
    assert pager.residency.audit() == []
    usable: set[int] = set()
    held: dict[int, set[int]] = {}
    ended_at = {step.plan.step: at for at, step in enumerate(steps)}
    for step in sorted(steps, key=lambda step: step.plan.step):
        commands = step.plan.commands
        usable -= {place for entry in commands.ban for place in range(entry.first, entry.last)}
        usable |= {place for entry in commands.allow for place in range(entry.first, entry.last)}
        if step.plan.ring is not None:
            held[step.plan.step] = set(range(step.plan.ring.first, step.plan.ring.last))
        for number, ring in held.items():
            if ended_at[step.plan.step] <= ended_at[number]:
                assert not ring & usable, "experts own places of a ring in use"
    assert held
    assert all(ring <= usable for ring in held.values()), "a ring was not given back"


def order_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What one pass gives to the streams of a device, in order: fills of halves, and layers."""
    order: list[tuple[str, int]] = []
    copy, table = PassRing._copy, PassRing.table
    monkeypatch.setattr(PassRing, "_copy", lambda ring, row: (order.append(("fill", row)), copy(ring, row)))
    monkeypatch.setattr(
        PassRing, "table", lambda ring, row: (order.append(("layer", row)), table(ring, row))[1]
    )
    steps, _, _ = serve(few_places(settings()), long_prompts(1, 120))
    assert any(step.plan.ring is not None for step in steps)
    return order[len(order) - 1 - order[::-1].index(("fill", 0)) :]


def seconds_of(order: Sequence[tuple[str, int]], fill_s: float, layer_s: float) -> float:
    """When a device with a stream for fills and one for layers has done all that, in this order: a fill waits for the
    layers launched before it, a layer for its own fill."""
    computed_s = link_s = 0.0
    filled: dict[int, float] = {}
    for what, row in order:
        if what == "fill":
            link_s = filled[row] = max(link_s, computed_s) + fill_s
        else:
            computed_s = max(computed_s, filled[row]) + layer_s
    return computed_s


def test_the_link_works_while_layers_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a simulated link: whichever takes longer never waits for the other."""
    order = order_of_a_pass(monkeypatch)
    layers = sum(what == "layer" for what, _ in order)
    assert layers == 4
    assert seconds_of(order, 2.0, 1.0) == layers * 2.0 + 1.0
    assert seconds_of(order, 1.0, 2.0) == 1.0 + layers * 2.0


def test_a_half_is_filled_by_programs_that_leave_the_device_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs: list[int] = []
    real = pass_ring.gather

    def note(table: torch.Tensor, targets: torch.Tensor, num_bytes: int, most: int = 0) -> None:
        programs.append(most)
        real(table, targets, num_bytes, most)

    monkeypatch.setattr(pass_ring, "gather", note)
    serve(few_places(settings()), long_prompts(1, 120))
    assert programs
    assert all(0 < most <= 32 for most in programs), "a fill takes every processor"


def test_few_tokens_of_a_prompt_are_computed_beside_the_streams() -> None:
    steps, _, _ = serve(settings(), [[40, 41, 42, 43, 44]])
    late = [step for step in steps if step.plan.started and step.plan.step > 3]
    assert late
    assert not any(step.plan.staged for step in late)


def test_passes_work_with_prefix_hits_and_retractions() -> None:
    """A memory that holds about two of the prompts, asked twice: hits, retractions, passes, and everybody ends."""
    config = settings(arena_bytes=700_000, expert_bytes=24576 * 2)
    prompts = long_prompts(3, 120)
    steps, engine, _ = serve(config, [*prompts, *prompts], tokens=60)
    assert any(step.plan.staged for step in steps)
    started = [row for step in steps for row in step.plan.started]
    assert len({row.request for row in started}) == 8
    assert engine.snapshot().num_retractions > 0 or engine.snapshot().cached_tokens > 0
    ordered = sorted(steps, key=lambda step: step.plan.step)
    resident = ModelRunner(replace(config, experts="resident", pass_tokens=0, expert_bytes=0), table_experts)
    want = replay_steps(resident, ordered, config.arena_bytes)
    assert same_results(want, [step.result for step in ordered])


def test_an_abort_takes_effect_when_the_pass_has_ended() -> None:
    engine = NativeEngine(settings(), audit=True)

    async def leave() -> None:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.submit(GenerateRequest("gone", tuple(range(20, 160)), sampling))
        engine.abort("gone")
        engine.submit(GenerateRequest("stays", tuple(range(30, 160)), sampling))
        last = [event async for event in engine.stream("stays")][-1]
        assert last.num_generated == 4

    try:
        asyncio.run(leave())
        engine._ledger.audit()
        assert engine.snapshot().num_running == 0
    finally:
        engine.close()


def test_the_pace_of_layers_is_kept_from_pass_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 0.4, 1.0, 1.3))
    monkeypatch.setattr("worker.execution.prefill_pass.time.perf_counter", lambda: next(now))
    pace = LayerPace(torch.device("cpu"))
    pace.begin_pass(100)
    assert pace.layers(10.0) == 1, "nothing is known yet"
    pace.end(pace.begin(), 4)
    assert [pace.layers(1.04) for _ in range(5)] == [10, 10, 11, 10, 11], "0.4 of a layer was lost each time"
    assert [pace.layers(0.17) for _ in range(3)] == [1, 1, 1], "streams waited for what earlier slices lacked"
    assert [pace.layers(0.05) for _ in range(3)] == [1, 1, 1]
    assert pace.layers(0.4) == 3, "what slices of one layer had too much is not owed for ever"
    pace.begin_pass(50)
    assert pace.layers(1.04) == 10, "the link may be what takes the time"
    pace.begin_pass(200)
    assert pace.layers(0.9) == 2
    pace.end(pace.begin(), 1)
    assert pace.layers(0.9) == 3
    pace.begin_pass(200, fill_s=0.45)
    assert pace.layers(0.9) == 2, "the link takes longer than computing does"


def test_the_size_of_a_pass_is_the_links() -> None:
    """Qwen3-30B-A3B in FP8 with 40 of 128 experts of each layer resident, 50 GB/s, 215 TFLOP/s: 4,224 experts of
    4.72 MB take 0.4 s, in which 23,700 tokens are computed; the activations' bound is what holds."""
    facts = PassFacts(48, 128, 8, 4_720_128, 48 * 40, 2048, 768)
    transfer_s = 48 * 88 * 4_720_128 / 50e9
    priced = int(transfer_s * 215e12 / (6 * 48 * 8 * 2048 * 768)) + 1
    assert priced_tokens(facts, 50e9, 215e12) == priced
    size = plan_passes(facts, 16_384, 40_960)
    assert size.tokens == 16_384
    assert f"{priced} tokens compute" in size.line
    assert f"{(2 << 30) // facts.token_bytes} fit" in size.line
    assert "a ring of 176 places" in size.line
    assert size.ring.places(48 * 40) == 2 * 88
    assert size.ring.places(48 * 128) == 0
    assert size.ring.places(0) == 2 * 128
    most = (2 << 30) // facts.token_bytes
    assert plan_passes(facts, 0, 40_960).tokens == most // 64 * 64, "what the activations leave"
    assert plan_passes(facts, 0, 40_960, activation_bytes=1 << 40).tokens == priced // 64 * 64
    assert plan_passes(facts, 0, 8192).tokens == 8192, "no request is longer"
    assert plan_passes(replace(facts, resident_places=48 * 128), 0, 8192).tokens == 0
    assert plan_passes(facts, 0, 0).tokens == 0
    assert plan_passes(facts, -1, 40_960).tokens == 0
    windowed = [full_spec(64), window_spec(40)]
    assert (
        tokens_in_windows(windowed, 1 << 20) == (1 << 16) * windowed[1].page_tokens // windowed[1].page_bytes
    )
    assert tokens_in_windows(windowed[:1], 1 << 20) == 1 << 20
    assert plan_passes(facts, -1, 40_960).line.startswith("prompts in steps")


@pytest.mark.parametrize(("pass_tokens", "captured"), [(PASS, 16), (-1, 32)])
def test_steps_bring_whole_prompts_in_graphs_where_there_are_no_passes(
    pass_tokens: int, captured: int
) -> None:
    runner = ModelRunner(settings(pass_tokens=pass_tokens))
    runner.attach_memory(runner.page_specs, ARENA)
    sizes = {tokens for _, tokens, _ in runner._mixed_graphs().keys}
    assert max(sizes) == captured >= MIXED_TOKENS


def test_the_kernels_of_a_first_ban_are_ready_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rescued: list[int] = []
    real = Rescuer._rescue
    monkeypatch.setattr(
        Rescuer,
        "_rescue",
        lambda rescuer, dropped: (rescued.append(int((dropped >= 0).sum())), real(rescuer, dropped)),
    )
    runner = ModelRunner(settings())
    runner.attach_memory(runner.page_specs, ARENA)
    assert rescued == [0], "compiled when places are taken, while streams wait"
    assert runner.pager is not None
    assert bool((runner.pager.residency.owner == BANNED).all())
    assert int(runner.pager.residency.counts.sum()) == 0
