"""Scores residency policies against Belady with bypass, on recorded routing and on a generator of known LRU hits.

    python -m benchmarks.expert_replay [--json FILE] [--routing FOLDER] [--seed N] [--steps N]

One pool of places for all layers, as on the device; K is places per layer. Hits are of distinct experts per step and
layer. The first tenth of the steps warms the pool and is not counted. No device and no bytes are involved: what is
scored is the decision. Recorded routing is of the later half of the texts: the policies' constants were chosen on the
earlier one.

Belady knows everything to come. Beside the policies stands what less knowledge would be worth on recorded routing:
``best_known`` goes by everything that :class:`worker.experts.policies.Successor` has learnt, in exact order at every
miss; ``told_0`` is told besides what the step under way will use, layer by layer, ``told_1`` and ``told_2`` the one or
two steps behind it as well. No router knows that much: a step's experts follow from tokens not sampled yet. What LFRU
reaches is therefore also stated as a share of ``best_known``, the learnable bound, and of ``told_2``, two tokens ahead.

``lfru_by_number`` gives places to misses in the order of their numbers, not of their worth. ``lfru_net_of_frozen`` is
what LFRU's hits, less :data:`EVICTION_MISSES` for each eviction, are of the hits of a set that stands still, where a
step asks for more experts than there are places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.limits import distinct_experts
from benchmarks.report import NOT_APPLICABLE, Conditions, Report, Value, publish, report_parser
from benchmarks.routing_traces import (
    PUBLISHED,
    RoutingModel,
    Steps,
    generate,
    layer_lru_hits,
    recorded,
)
from worker.experts.policies import (
    Frozen,
    Lfru,
    Lru,
    Policy,
    Pool,
    Successor,
    belady_hits,
    foresight_hits,
)

GENERATED = (("generated.s1", (0,)), ("generated.s4", (0,) * 4), ("generated.s4d4", (0, 1, 2, 3)))
"""Streams and, where there are several, their domains."""
RECORDED_SHARES = (0.1875, 0.3125, 0.71875)
TOLD = (-1, 0, 1, 2)
WARM_SHARE = 0.1
EVICTION_MISSES = 1.0
"""What an eviction is taken to cost beside its miss, in misses: about what was seen on an H200, where a step of four
domains with 2.96 evictions took 0.26 ms longer than one that read everything in place, and a miss of 4.7 MB 0.085 ms
(gather lane, 12 layers, K=24)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Steps to replay and what they are; ``bounded``: whether what some knowledge of what comes would be worth is asked
    too."""

    name: str
    steps: Steps
    num_layers: int
    num_experts: int
    places_per_layer: tuple[int, ...]
    bounded: bool = False


def generated_traces(seed: int, num_steps: int) -> Iterator[Trace]:
    """The generator's traces."""
    model = RoutingModel()
    for name, domains in GENERATED:
        steps = generate(model, domains, num_steps, seed)
        yield Trace(name, steps, model.num_layers, model.num_experts, (8, 24, 49, 81))


def recorded_traces(folder: Path, num_steps: int) -> Iterator[Trace]:
    """The recorded routing's chats and documents, as one stream and as four."""
    from demo.expert_routing import load

    what = load(folder)
    layers, experts = what.chosen.shape[0], what.num_experts
    places = tuple(round(share * experts) for share in RECORDED_SHARES)
    for chats, kind in ((True, "chats"), (False, "documents")):
        for streams in (1, 4):
            texts = what.texts(chats)
            steps = recorded(what.chosen, texts[len(texts) // 2 :], experts, streams)[:num_steps]
            yield Trace(f"{kind}.s{streams}", steps, layers, experts, places, True)


def policies(pool: Pool, num_steps: int) -> dict[str, Policy]:
    """Those that are compared. The frozen set learns while the pool warms."""
    return {
        "lru": Lru(pool),
        "lfru": Lfru(pool),
        "lfru_by_number": Lfru(pool, ranked=False),
        "successor": Successor(pool),
        "frozen": Frozen(pool, max(1, int(WARM_SHARE * num_steps))),
    }


def bounds_of(trace: Trace, pool: Pool, warm: int, best: float, ours: float) -> dict[str, Value]:
    """What some knowledge of the future would reach of ``best`` hits, and ``ours`` of that; None where not asked."""
    row: dict[str, Value] = {}
    told = {}
    for window in TOLD:
        name = f"told_{window}" if window >= 0 else "best_known"
        told[name] = sum(foresight_hits(trace.steps, pool, window)[warm:]) if trace.bounded else 0
        row[f"{name}_of_belady"] = round(told[name] / best, 4) if trace.bounded else None
    for name in ("best_known", "told_2"):
        row[f"lfru_of_{name}"] = round(ours / told[name], 4) if trace.bounded else None
    return row


def sharing_note(trace: Trace, streams: int, per_token: int) -> str:
    """How many distinct experts the streams of a trace take, beside what independent uniform ones would."""
    taken = sum(len(keys) for layers in trace.steps for keys in layers) / len(trace.steps) / trace.num_layers
    chance = distinct_experts(trace.num_experts, per_token, streams)
    return (
        f"{trace.name}: {taken:.1f} distinct experts a layer and step of {streams * per_token} choices"
        f" ({chance:.1f} if uniform and independent)."
    )


def rows_of(trace: Trace) -> Iterator[dict[str, Value]]:
    """A row per number of places."""
    warm = int(WARM_SHARE * len(trace.steps))
    uses = sum(len(keys) for layers in trace.steps[warm:] for keys in layers)
    for places in trace.places_per_layer:
        pool = Pool(places * trace.num_layers, trace.num_layers, trace.num_experts)
        best = sum(belady_hits(trace.steps, pool.num_places)[warm:]) / uses
        row: dict[str, Value] = {
            "case": f"{trace.name}.k{places}",
            "experts_per_step": round(uses / (len(trace.steps) - warm), 1),
            "belady": round(best, 4),
        }
        found = {}
        evictions = 0
        for name, policy in policies(pool, len(trace.steps)).items():
            hits = [policy.step(layers) for layers in trace.steps[:warm]]
            before = policy.evictions if isinstance(policy, Lfru) else 0
            hits = [policy.step(layers) for layers in trace.steps[warm:]]
            found[name] = sum(hits) / uses
            row[name] = round(found[name], 4)
            if name == "lfru" and isinstance(policy, Lfru):
                evictions = policy.evictions - before
        for name in ("lfru", "successor"):
            row[f"{name}_of_belady"] = round(found[name] / best, 4)
        crowded = uses / (len(trace.steps) - warm) > pool.num_places
        net = found["lfru"] - EVICTION_MISSES * evictions / uses
        row["lfru_net_of_frozen"] = round(net / found["frozen"], 4) if crowded else None
        row |= bounds_of(trace, pool, warm, best * uses, found["lfru"] * uses)
        yield row


def calibration_note(seed: int, num_steps: int) -> str:
    """The curve that the generator gives with this seed beside the published one."""
    steps = generate(RoutingModel(), (0,), num_steps, seed)
    pairs = (f"K={k}: {layer_lru_hits(steps, k):.1%} ({wanted:.0%})" for k, wanted in PUBLISHED.items())
    return f"Generator, seed {seed}: per-layer LRU hits of one stream (published): {', '.join(pairs)}."


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = report_parser(__doc__)
    parser.add_argument(
        "--routing", type=Path, help="a folder with routing.npz, as the demonstration model's"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200, help="most steps of a trace")
    options = parser.parse_args(arguments)
    traces = list(generated_traces(options.seed, options.steps))
    notes = [calibration_note(options.seed, options.steps), f"Generator settings: {RoutingModel()}."]
    prompts = "generated routing"
    if options.routing is not None:
        traces += recorded_traces(options.routing, options.steps)
        prompts = "generated routing; the demonstration model's own routing on half of its evaluation texts"
    for trace in traces:
        if "s4" in trace.name:
            notes.append(sharing_note(trace, 4, 4 if trace.bounded else RoutingModel().per_token))
    rows = tuple(row for trace in traces for row in rows_of(trace))
    known = [row for row in rows if row["told_1_of_belady"] is not None]
    for name in ("lfru_of_belady", "best_known_of_belady", "told_1_of_belady", "told_2_of_belady",
                 "lfru_of_best_known", "lfru_of_told_2"):  # fmt: skip
        if known:
            ratios = [float(row[name] or 0) for row in known]
            notes.append(f"{name} on recorded routing: {min(ratios):.1%} to {max(ratios):.1%}.")
    conditions = Conditions(
        model="generator: 6 layers x 128 experts, 8 per token; recorded: 8 x 32, 4 per token",
        weights="trained (recorded routing)" if options.routing is not None else NOT_APPLICABLE,
        prompts=prompts,
        cache=f"experts warm: the first {WARM_SHARE:.0%} of the steps are not counted",
        batch="1 and 4 streams",
        context=f"at most {options.steps} steps a trace",
        resident="K places per layer, one pool for all layers",
    )
    publish(Report("expert_replay", conditions, rows, tuple(notes)), options.json)


if __name__ == "__main__":
    main()
