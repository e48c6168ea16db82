"""Measures decode steps of a model whose experts are paged, against what link and memory allow.

    python -m benchmarks.paged_decode --model qwen3-30b-a3b --formats fp8 int4 --places 24 40 92 [--json FILE]

Through the engine. Each token's experts are imposed, step by step: ``random`` draws them uniformly, ``calibrated``
comes from a generator whose LRU hits follow a published curve (``benchmarks.routing_traces``), one domain for all
streams; ``domains`` gives each stream its own. K is places per layer, one pool for all layers, lowered on the running
engine. A case is called ``<format>.k<K>.<routing>.b<batch>``.

The limit of a step uses this run's misses by layer, the measured time to bring n experts, and the measured step of an
engine whose experts are all resident, under the same routing: no decision, no stamps, constant addresses. Beside it
the old ways with as many bytes of the device: every layer streamed each pass, and whole layers kept or streamed.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from benchmarks.gpu_engine import copy_bytes_per_s, generate, random_prompts
from benchmarks.limits import LinkCurve, foresight_step_s, in_layer_step_s, share_of_limit
from benchmarks.paging.engines import PROMPT_TOKENS, SPARE_ARENA_BYTES, Bench, open_bench
from benchmarks.paging.link import link_curve
from benchmarks.paging.loading import watched_memory
from benchmarks.paging.routing import CALIBRATED, DOMAINS, RANDOM, Trace, make_trace
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.routing_traces import RoutingModel
from benchmarks.shapes import DEMO, cut_folder, shape_geometry
from memory.device.residency import Lane
from worker.advise.formats import find_format

TIMED_STEPS = {1: 24, 4: 10, 16: 5, 64: 3}
"""By batch: long steps need fewer."""
WARM_STEPS = {1: 48, 4: 16, 16: 6, 64: 2}
"""Of calibrated routing, so that the places hold what it uses; random routing has nothing to learn."""
TRACE_LENGTHS = {1: 192, 4: 128, 16: 48, 64: 24}
"""Steps until a trace repeats itself."""
FILLING_STEPS = 8
SCAN_TOKENS, SCAN_DECODED = 32768, 100
SCAN_ARENA_BYTES = 4 << 30
OLD_WAYS_STEPS = 3
COMPARED_PLACES = 40
"""K at which the old ways are compared, and prefill is."""
CROWDED_PLACES, ROOMY_PLACES = 24, 92
COLUMNS = (
    "case", "tokens_per_s", "hit_rate", "bytes_per_step", "link_busy", "share", "share_perfect", "step_ms",
    "limit_ms", "resident_ms", "evictions",
)  # fmt: skip
Row = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. ``quick``: tiny models on a CPU, few steps."""

    places: tuple[int, ...]
    batches: tuple[int, ...]
    routings: tuple[str, ...]
    settings: Mapping[str, object]
    memory_rate: float
    scan_tokens: int = SCAN_TOKENS
    on_gpu: bool = True

    def timed(self, batch: int) -> int:
        """Steps of a case that are timed."""
        return TIMED_STEPS.get(batch, 8) if self.on_gpu else 10

    def warm(self, routing: str, batch: int) -> int:
        """Steps ahead of them."""
        return 2 if routing == RANDOM else WARM_STEPS.get(batch, 8) if self.on_gpu else 10


@cache
def trace_of(routing: str, model: RoutingModel, batch: int) -> Trace:
    """The trace of a case, the same at every K and for the resident engine."""
    return make_trace(routing, model, batch, TRACE_LENGTHS.get(batch, 48), seed=batch)


@dataclass
class Measured:
    """What one format's engines were found to do."""

    format: str
    plan: Plan
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resident_s: dict[tuple[str, int], float] = field(default_factory=dict)
    summary: Row = field(default_factory=dict)

    def rate(self, case: str) -> float | None:
        """Tokens per second of a case of this format, None where it was not measured."""
        for row in self.rows:
            if row["case"] == f"{self.format}.{case}":
                value = row["tokens_per_s"]
                return float(value) if isinstance(value, float) else None
        return None

    def ratio(self, left: str, right: str) -> float | None:
        """Between two cases' tokens per second."""
        above, below = self.rate(left), self.rate(right)
        return above / below if above and below else None


def all_hit_ratio(rows: Sequence[Row]) -> float:
    """The worst of the cases in which nothing was missed: its step over the resident engine's."""
    ratios = [
        float(row["step_ms"] or 0) / float(row["resident_ms"] or 1) for row in rows if row["hit_rate"] == 1.0
    ]
    return max(ratios, default=0.0)


def case_row(
    label: str, streams: int, step_s: float, counts: torch.Tensor, size: int, resident_s: float, curve: LinkCurve,
    memory_rate: float,
) -> Row:  # fmt: skip
    """One row of the table; ``counts`` [lanes, layers] a step, ``size`` of a block."""
    hits = counts[Lane.HIT]
    misses = counts[Lane.TEE] + counts[Lane.IN_PLACE]
    miss_bytes = float(misses.sum()) * size
    per_layer = [(float(n), float(h) * size / memory_rate) for n, h in zip(misses, hits, strict=True)]
    limit_s = in_layer_step_s(resident_s, per_layer, curve)
    most = max(count for count, _ in curve.points)
    rate = most * size / curve.seconds(most)
    values = (
        label, streams / step_s, float(hits.sum() / (hits + misses).sum().clamp_min(1e-9)), miss_bytes,
        miss_bytes / rate / step_s, share_of_limit(limit_s, step_s),
        share_of_limit(foresight_step_s(resident_s, miss_bytes, rate), step_s), 1e3 * step_s, 1e3 * limit_s,
        1e3 * resident_s, float(counts[Lane.EVICTED].sum()),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def say(row: Row) -> None:
    """A row as soon as it is known."""
    shown = {name: round(value, 4) for name, value in row.items() if isinstance(value, float)}
    print(f"{time.perf_counter():.1f} {row['case']} {shown}", flush=True)


def cases(plan: Plan) -> Iterator[tuple[str, int]]:
    """(routing, batch) of every case of a K."""
    return ((routing, batch) for routing in plan.routings for batch in plan.batches)


def measure_resident(found: Measured, bench: Bench) -> None:
    """Steps with all experts at constant addresses."""
    plan = found.plan
    for routing, batch in (*cases(plan), *([(DOMAINS, 4)] if 4 in plan.batches else [])):
        trace = trace_of(routing, bench.model, batch)
        found.resident_s[routing, batch], _ = bench.run(trace, max(24, plan.timed(batch)), 4)
    found.notes.append(
        f"{found.format}: resident engine started in {bench.started_s:.1f} s; steps of "
        + ", ".join(
            f"{1e3 * s:.2f} ms ({routing}, {batch})" for (routing, batch), s in found.resident_s.items()
        )
    )


def measure_case(
    found: Measured, bench: Bench, curve: LinkCurve, places: int, routing: str, batch: int, name: str = ""
) -> None:
    """One case; ``name`` stands in for the routing's."""
    plan = found.plan
    trace = trace_of(routing, bench.model, batch)
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
    """Four streams of four domains, and where places are scarce the same with a set that stands still."""
    measure_case(found, bench, curve, places, DOMAINS, 4)
    if places == CROWDED_PLACES:
        in_place_only(bench, on=True)
        measure_case(found, bench, curve, places, DOMAINS, 4, "in_place")
        in_place_only(bench, on=False)


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
    ours = found.rate(f"k{places}.{CALIBRATED}.b1")
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


def measure_paged(found: Measured, bench: Bench, is_first: bool) -> None:
    """All cases of an engine with paged experts, K from all experts downwards."""
    plan, every = found.plan, bench.engine.model.num_experts
    curve = link_curve(bench.pager.host, bench.pager.residency.owner.device)
    size = bench.pager.host.block_bytes[0]
    found.notes.append(
        f"{found.format}: paged engine started in {bench.started_s:.1f} s, {bench.num_layers} layers;"
        f" {bench.pager.lanes.line()}; "
        + ", ".join(f"{n:.0f} experts at {n * size / s / 1e9:.1f} GB/s" for n, s in curve.points)
    )
    most = max(plan.batches)
    bench.set_places(every)
    bench.run(trace_of(RANDOM, bench.model, most), FILLING_STEPS)  # every expert finds a place
    eager = bench.eager_steps()
    for places in (every, *sorted(plan.places, reverse=True)):
        bench.set_places(places)
        for routing, batch in cases(plan):
            measure_case(found, bench, curve, places, routing, batch)
        if is_first and 4 in plan.batches and places in (CROWDED_PLACES, ROOMY_PLACES):
            measure_domains(found, bench, curve, places)
        if is_first and places == COMPARED_PLACES and CALIBRATED in plan.routings:
            measure_scan(found, bench)
            eager_before = bench.eager_steps()
            if plan.on_gpu:
                measure_old_ways(found, bench, places)
            eager += bench.eager_steps() - eager_before
    found.summary["graph.eager_decode_steps"] = bench.eager_steps() - eager
    bench.pager.raise_if_corrupt()


def settings_for(plan: Plan, expert_bytes: int, scans: bool) -> dict[str, object]:
    """An arena for ``expert_bytes`` and some KV, and where a long prompt is to come, for that."""
    arena = expert_bytes + SPARE_ARENA_BYTES + (SCAN_ARENA_BYTES if scans else 0)
    return {
        **plan.settings,
        "max_model_len": plan.scan_tokens + 2048 if scans else 512,
        "arena_bytes": arena if plan.on_gpu else 0,
    }


def measure_format(found: Measured, model: str, layers: int, is_first: bool) -> None:
    """All rows of a weight format: one engine with resident experts, one with paged ones."""
    format, plan = found.format, found.plan
    folder = cut_folder(model, format, layers)
    resident = {**settings_for(plan, 0, scans=False), "host_store": "private"}
    bench = open_bench(folder, "resident", plan.batches, resident)
    measure_resident(found, bench)
    bench.close()
    del bench
    # Every expert has a place, and some more: bands of KV take what lies at the ends.
    expert_bytes = int(1.03 * shape_geometry(folder).all_experts_bytes(find_format(format)))
    settings = settings_for(plan, expert_bytes, scans=is_first)
    with watched_memory() as memory:
        bench = open_bench(folder, "paged", plan.batches, settings)
    host = bench.pager.host
    if is_first:
        found.summary |= {
            "load.peak_host_ratio": memory.grown_bytes / host.num_bytes,
            "load.start_s": bench.started_s,
            "load.pin_s": host.pinning_s,
        }
    found.notes.append(
        f"{format}: {host.num_bytes / 1e9:.2f} GB of experts; laid out and pinned in {host.pinning_s:.1f} s; host"
        f" memory grew by {memory.grown_bytes / 1e9:.2f} GB at most"
    )
    measure_paged(found, bench, is_first)
    if is_first and plan.settings.get("host_store") == "shared":
        small = {**settings_for(plan, 0, scans=False), "max_running": 1}
        second = open_bench(folder, "paged", (1,), small)
        found.summary["load.second_replica_s"] = second.started_s
        second.close()
    bench.close()
    found.summary |= {
        "all_hit_over_resident": all_hit_ratio(found.rows),
        "one_domain_k24_over_one_stream": found.ratio("k24.calibrated.b4", "k24.calibrated.b1"),
        "four_domains_k92_over_one_stream": found.ratio("k92.domains.b4", "k92.calibrated.b1"),
        "four_domains_k24_over_in_place": found.ratio("k24.domains.b4", "k24.in_place.b4"),
    }


def report(all_found: Sequence[Measured], conditions: Conditions) -> Report:
    """One table: every case, and a row of what was found besides, of the first format."""
    summary: Row = {"case": "all", **all_found[0].summary}
    eager = [found.summary.get("graph.eager_decode_steps") for found in all_found]
    summary["graph.eager_decode_steps"] = sum(value for value in eager if isinstance(value, float))
    columns = (*COLUMNS, *(name for name in summary if name not in COLUMNS))
    rows = [*(row for found in all_found for row in found.rows), summary]
    filled = tuple({name: row.get(name) for name in columns} for row in rows)
    return Report(
        "paged_decode", conditions, filled, tuple(note for found in all_found for note in found.notes)
    )


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
        copy_bytes_per_s() if on_gpu else 10e9, options.scan_tokens, on_gpu,
    )  # fmt: skip
    found: list[Measured] = []
    try:
        for number, format in enumerate(options.formats):
            found.append(Measured(format, plan))
            measure_format(found[-1], options.model, options.layers, is_first=number == 0)
    except KeyboardInterrupt:
        found[-1].notes.append("interrupted: cases are missing")
    found[0].notes.insert(0, f"memory: {plan.memory_rate / 1e12:.2f} TB/s read and written")
    publish(report(found, conditions_of(options)), options.json)


if __name__ == "__main__":
    main()
