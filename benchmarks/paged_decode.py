"""Measures decode steps of a model whose experts are paged, against what link and memory allow.

    python -m benchmarks.paged_decode --model qwen3-30b-a3b --formats fp8 int4 --places 24 40 92 [--json FILE]

Through the engine. Each token's experts are imposed, step by step: ``random`` draws them uniformly, ``calibrated``
comes from a generator whose LRU hits follow a published curve (``benchmarks.routing_traces``), one domain for all
streams; ``domains`` gives each stream its own. K is places per layer, one pool for all layers, lowered on the running
engine. A case is called ``<format>.k<K>.<routing>.b<batch>``.

The limit of a step uses this run's misses by layer, the measured time to bring n experts, and the measured step of an
engine whose experts are all resident, under the same routing: no decision, no stamps, constant addresses. Beside it
the old ways with as many bytes of the device: every layer streamed each pass, and whole layers kept or streamed.

With ``--json`` the file is written anew behind every case, so that a run that is cut keeps what it has; ``--onto`` an
earlier run's file adds to that one's cases, and ``--cases-only`` leaves out what is no case of the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.gpu_engine import copy_bytes_per_s, generate, random_prompts
from benchmarks.limits import LinkCurve
from benchmarks.paging.attainable import Machine, least_step_s, need_of, sharing_note
from benchmarks.paging.cases import (
    COLUMNS,
    WARM_STEPS,
    Measured,
    Plan,
    Row,
    all_hit_ratio,
    case_row,
    cases,
    say,
    trace_of,
)
from benchmarks.paging.engines import PROMPT_TOKENS, SPARE_ARENA_BYTES, Bench, open_bench
from benchmarks.paging.link import link_curve
from benchmarks.paging.loading import watched_memory
from benchmarks.paging.publishing import report, same_table, write
from benchmarks.paging.routing import CALIBRATED, DOMAINS, RANDOM, Trace, make_trace
from benchmarks.report import Conditions, publish, report_parser
from benchmarks.routing_traces import RoutingModel
from benchmarks.shapes import DEMO, cut_folder, shape_geometry
from memory.device.residency import Lane
from worker.advise.formats import find_format

WAKING_S = 0.5
"""An engine's first steps are slower, and so is a GPU at rest."""
FILLING_STEPS, FILLING_RUNS = 8, 4
LEARNING_STEPS = 40
"""Of several domains, ahead of comparing a set that goes on learning with one that stands still."""
SCAN_TOKENS, SCAN_DECODED = 32768, 100
SCAN_ARENA_BYTES = 4 << 30
OLD_WAYS_STEPS = 3
COMPARED_PLACES = 40
"""K at which the old ways are compared, and prefill is."""
CROWDED_PLACES, ROOMY_PLACES = 24, 92


def measure_resident(found: Measured, bench: Bench) -> None:
    """Steps with all experts at constant addresses."""
    plan = found.plan
    every = [*cases(plan), *([(DOMAINS, 4)] if 4 in plan.batches else [])]
    begun_s, most = time.perf_counter(), max(plan.batches)
    while time.perf_counter() - begun_s < WAKING_S:
        bench.run(trace_of(plan.routings[0], bench.model, most), plan.timed(most))
    for routing, batch in every:
        trace = trace_of(routing, bench.model, batch)
        found.resident_s[routing, batch], _ = bench.run(trace, max(24, plan.timed(batch)), 4)
    found.notes.append(
        f"{found.format}: resident engine started in {bench.started_s:.1f} s; steps of "
        + ", ".join(
            f"{1e3 * s:.2f} ms ({routing}, {batch})" for (routing, batch), s in found.resident_s.items()
        )
    )


def measure_case(
    found: Measured, bench: Bench, curve: LinkCurve, places: int, routing: str, batch: int, name: str = "",
    trace: Trace | None = None,
) -> None:  # fmt: skip
    """One case; ``name`` stands in for the routing's, ``trace`` for its trace."""
    plan = found.plan
    trace = trace_of(routing, bench.model, batch) if trace is None else trace
    step_s, counts = bench.run(trace, plan.timed(batch), plan.warm(routing, batch))
    if name:  # nothing stamps: what is found in place counts as a prefill's
        counts[Lane.HIT], counts[Lane.IN_PLACE] = counts[Lane.PREFILL_HIT], counts[Lane.PREFILL_IN_PLACE]
    label = f"{found.format}.k{places}.{name or routing}.b{batch}"
    size = bench.pager.host.block_bytes[0]
    row = case_row(
        label, batch, step_s, counts, size, found.resident_s[routing, batch], curve, plan.memory_rate
    )
    found.rows.append(row)
    say(row)


def in_place_only(bench: Bench, on: bool) -> None:
    """While on, no row stamps: the set of resident experts stands still, and what is missing is read in place."""
    residency = bench.pager.residency
    begin = type(residency).begin_step

    def begin_step(step: int, num_stamping: int) -> None:
        begin(residency, step, 0)

    if on:
        residency.begin_step = begin_step  # type: ignore[method-assign]
    else:
        del residency.begin_step


def measure_domains(found: Measured, bench: Bench, curve: LinkCurve, places: int) -> None:
    """Four streams of four domains, and where places are scarce the same with a set that stands still: both from the
    set, and the uses, that the same steps before have left, and over the same steps, which neither has seen."""
    if places != CROWDED_PLACES:
        measure_case(found, bench, curve, places, DOMAINS, 4)
        return
    trace = trace_of(DOMAINS, bench.model, 4)
    learning = LEARNING_STEPS if found.plan.on_gpu else 30
    bench.run(trace, learning)
    later = np.roll(trace, -learning, axis=0)
    uses = bench.pager.residency.tables()["uses"]
    learnt = uses.clone()
    in_place_only(bench, on=True)
    measure_case(found, bench, curve, places, DOMAINS, 4, "in_place", later)
    in_place_only(bench, on=False)
    uses.copy_(learnt)
    measure_case(found, bench, curve, places, DOMAINS, 4, trace=later)


def measure_scan(found: Measured, bench: Bench) -> None:
    """Hits of a stream's 100 tokens before and after a long prompt passes through."""
    tokens = found.plan.scan_tokens
    trace = make_trace(CALIBRATED, bench.model, 1, seed=7)

    decoded = SCAN_DECODED if found.plan.on_gpu else 20

    def hit_rate() -> float:
        counts = bench.run(None, decoded)[1]
        return float(counts[Lane.HIT].sum() / counts[[Lane.HIT, Lane.TEE, Lane.IN_PLACE]].sum())

    bench.run(trace, found.plan.warm(CALIBRATED, 1))
    before = hit_rate()
    started_s = time.perf_counter()
    generate(bench.engine, random_prompts(1, tokens, bench.engine.model.vocab_size, seed=11), 1)
    took_s = time.perf_counter() - started_s
    after = hit_rate()
    found.summary |= {"scan.hit_rate_before": before, "scan.hit_rate_after": after}
    found.notes.append(f"{found.format}: a prompt of {tokens} tokens took {took_s:.1f} s")


def measure_old_ways(found: Measured, bench: Bench, places: int) -> None:
    """The two ways of offloading by layers, with as many bytes of experts on the device as ``places`` a layer hold."""
    assert bench.stream is not None
    ours = found.value(f"k{places}.{CALIBRATED}.b1")
    trace = trace_of(CALIBRATED, bench.model, 1)
    graphs = bench.runner.graphs
    assert graphs is not None
    kept = places * bench.num_layers // bench.engine.model.num_experts
    for name, layers, figure in (
        ("stream_all", 0, "streaming_factor"),
        ("whole_layers", kept, "offload_factor"),
    ):
        bench.stream.start(layers)
        graphs.replaying = False
        step_s, _ = bench.run(trace, OLD_WAYS_STEPS)
        bytes_per_step = float(bench.stream.pass_bytes)
        graphs.replaying = True
        bench.stream.stop()
        row: Row = dict.fromkeys(COLUMNS)
        row |= {
            "case": f"{found.format}.k{places}.{name}.b1",
            "tokens_per_s": 1 / step_s,
            "step_ms": 1e3 * step_s,
        }
        row["bytes_per_step"] = bytes_per_step
        found.rows.append(row)
        say(row)
        if ours is not None:
            found.summary[figure] = ours * step_s


def fill_places(found: Measured, bench: Bench) -> None:
    """Runs steps until every expert has a place."""
    trace = trace_of(RANDOM, bench.model, max(found.plan.batches))
    for _ in range(FILLING_RUNS):
        bench.run(trace, FILLING_STEPS)
        if bool(bench.pager.residency.resident.all()):
            return
    missing = int((~bench.pager.residency.resident).sum())
    found.notes.append(f"{found.format}: {missing} experts found no place: no case is all hits")


def measure_paged(found: Measured, bench: Bench, besides: bool, keep: Callable[[], None]) -> None:
    """All cases of an engine with paged experts, K from all experts downwards; ``keep`` is called behind each."""
    plan, every = found.plan, bench.engine.model.num_experts
    curve = link_curve(bench.pager.host, bench.pager.residency.owner.device)
    size = bench.pager.host.block_bytes[0]
    found.notes.append(
        f"{found.format}: paged engine started in {bench.started_s:.1f} s, {bench.num_layers} layers;"
        f" {bench.pager.lanes.line()}; "
        + ", ".join(f"{n:.0f} experts at {n * size / s / 1e9:.1f} GB/s" for n, s in curve.points)
    )
    bench.set_places(every)
    fill_places(found, bench)
    eager = bench.eager_steps()
    for places in (every, *sorted(plan.places, reverse=True)):
        bench.set_places(places)
        for routing, batch in cases(plan):
            measure_case(found, bench, curve, places, routing, batch)
            keep()
        if besides and 4 in plan.batches and places in (CROWDED_PLACES, ROOMY_PLACES):
            measure_domains(found, bench, curve, places)
        if besides and places == COMPARED_PLACES and CALIBRATED in plan.routings:
            measure_scan(found, bench)
            eager_before = bench.eager_steps()
            if plan.on_gpu:
                measure_old_ways(found, bench, places)
            eager += bench.eager_steps() - eager_before
    found.summary["graph.eager_decode_steps"] = bench.eager_steps() - eager
    bench.pager.raise_if_corrupt()
    if besides:
        state_attainable(found, bench.model, Machine(size, curve, plan.memory_rate))


def state_attainable(found: Measured, model: RoutingModel, machine: Machine) -> None:
    """What four streams of one domain can be worth beside one where places are scarce: at the limits of the steps that
    both took, and if both missed no more than Belady would under this routing."""
    case, places = f"k{CROWDED_PLACES}.{CALIBRATED}", CROWDED_PLACES
    ours = [found.value(f"{case}.b{batch}", "limit_ms") for batch in (1, 4)]
    if ours[0] is None or ours[1] is None:
        return
    traces = [
        trace_of(routing, model, batch) for routing, batch in ((CALIBRATED, 1), (CALIBRATED, 4), (DOMAINS, 4))
    ]
    one, four, apart = (need_of(trace, model, places) for trace in traces)
    best = [
        least_step_s(need, model.num_layers, found.resident_s[CALIBRATED, batch], machine)
        for need, batch in ((one, 1), (four, 4))
    ]
    found.summary |= {
        "one_domain_k24_limit": 4 * ours[0] / ours[1],
        "one_domain_k24_belady_limit": 4 * best[0] / best[1],
    }
    found.notes.append(f"{found.format}: {sharing_note(one, four, apart, model)}")


def settings_for(plan: Plan, expert_bytes: int, scans: bool) -> dict[str, object]:
    """An arena for ``expert_bytes`` and some KV, and where a long prompt is to come, for that."""
    arena = expert_bytes + SPARE_ARENA_BYTES + (SCAN_ARENA_BYTES if scans else 0)
    return {
        **plan.settings,
        "max_model_len": plan.scan_tokens + 2048 if scans else 512,
        "arena_bytes": arena if plan.on_gpu else 0,
    }


def measure_format(
    found: Measured, model: str, layers: int, is_first: bool, keep: Callable[[], None]
) -> None:
    """All rows of a weight format: one engine with resident experts, one with paged ones."""
    format, plan = found.format, found.plan
    besides = is_first and plan.besides
    folder = cut_folder(model, format, layers)
    # As long a model as the paged engine's: attention is captured by bounds of the context, and timed for each.
    resident = {**settings_for(plan, 0, scans=besides), "host_store": "private"}
    bench = open_bench(folder, "resident", plan.batches, resident)
    measure_resident(found, bench)
    bench.close()
    del bench
    # Every expert has a place, and some more: bands of KV take what lies at the ends.
    expert_bytes = int(1.03 * shape_geometry(folder).all_experts_bytes(find_format(format)))
    settings = settings_for(plan, expert_bytes, scans=besides)
    with watched_memory() as memory:
        bench = open_bench(folder, "paged", plan.batches, settings)
    host = bench.pager.host
    if besides:
        found.summary |= {
            "load.peak_host_ratio": memory.grown_bytes / host.num_bytes,
            "load.start_s": bench.started_s,
            "load.pin_s": host.pinning_s,
        }
    found.notes.append(
        f"{format}: {host.num_bytes / 1e9:.2f} GB of experts; laid out and pinned in {host.pinning_s:.1f} s; host"
        f" memory grew by {memory.grown_bytes / 1e9:.2f} GB at most"
    )
    measure_paged(found, bench, besides, keep)
    found.summary["all_hit_over_resident"] = all_hit_ratio(found.rows)
    if besides:
        state_ratios(found)
    keep()
    if besides and plan.settings.get("host_store") == "shared":
        small = {**settings_for(plan, 0, scans=False), "max_running": 1}
        second = open_bench(folder, "paged", (1,), small)
        found.summary["load.second_replica_s"] = second.started_s
        second.close()
    bench.close()


def state_ratios(found: Measured) -> None:
    """Several streams beside one, and beside a set that stands still."""
    found.summary |= {
        "one_domain_k24_over_one_stream": found.ratio("k24.calibrated.b4", "k24.calibrated.b1"),
        "four_domains_k92_over_one_stream": found.ratio("k92.domains.b4", "k92.calibrated.b1"),
        "four_domains_k24_over_in_place": found.ratio("k24.domains.b4", "k24.in_place.b4"),
    }


def conditions_of(options: argparse.Namespace) -> Conditions:
    """What the figures hold for."""
    cut = f", {options.layers} layers" if options.layers else ""
    return Conditions(
        model=f"{options.model} (shape{cut})",
        weights="trained" if options.model == DEMO else "random",
        prompts=f"random ids, {PROMPT_TOKENS} tokens; experts imposed: {', '.join(options.routings)}, {DOMAINS}",
        cache="experts warm; no prefix cache",
        batch=", ".join(map(str, options.batches)),
        context=f"{PROMPT_TOKENS} to {PROMPT_TOKENS + 2 * max(WARM_STEPS.values())} tokens",
        resident=f"K = {', '.join(map(str, options.places))} places a layer, one pool",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a named shape, or demo")
    parser.add_argument("--formats", nargs="+", default=["fp8", "int4"])
    parser.add_argument("--places", type=int, nargs="+", default=[24, 40, 92], help="K, places per layer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--routings", nargs="+", default=[RANDOM, CALIBRATED], choices=[RANDOM, CALIBRATED])
    parser.add_argument("--layers", type=int, default=0, help="so many of the shape's layers only")
    parser.add_argument("--scan-tokens", type=int, default=SCAN_TOKENS)
    parser.add_argument("--host-store", default="private", choices=["private", "shared"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--cases-only", action="store_true", help="no domains, scan, old ways, second replica"
    )
    parser.add_argument("--onto", type=Path, help="an earlier run's --json file, whose other cases are kept")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    on_gpu = options.device != "cpu"
    settings: dict[str, object] = {
        "device": options.device,
        "load": "checkpoint" if options.model == DEMO else "random",
        "host_store": options.host_store,
        "max_running": max(options.batches),
        "max_step_tokens": 2048,
    }
    plan = Plan(
        tuple(options.places), tuple(options.batches), tuple(options.routings), settings,
        copy_bytes_per_s() if on_gpu else 10e9, options.scan_tokens, on_gpu, not options.cases_only,
    )  # fmt: skip
    found: list[Measured] = []
    conditions = conditions_of(options)
    if options.onto is not None:
        same_table(json.loads(options.onto.read_text())["conditions"], conditions)

    def keep() -> None:
        write(report(found, conditions), options.json, options.onto)

    try:
        for number, format in enumerate(options.formats):
            found.append(Measured(format, plan))
            measure_format(found[-1], options.model, options.layers, number == 0, keep)
    except KeyboardInterrupt:
        found[-1].notes.append("interrupted: cases are missing")
    found[0].notes.insert(0, f"memory: {plan.memory_rate / 1e12:.2f} TB/s read and written")
    publish(report(found, conditions), None)
    keep()


if __name__ == "__main__":
    main()
