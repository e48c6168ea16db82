"""Sets expert places that follow use against a fixed number of them: chats, a burst of long prompts, chats, both.

    python -m benchmarks.elastic [--model demo --format bf16 --device cpu --arena-mb 30 --settings elastic k8 k16 k24]
                                 [--seconds 8] [--link-mb-per-s 400] [--pass-tokens 512] [--no-replay] [--json FILE]
    python -m benchmarks.elastic --model qwen3-30b-a3b --format fp8 --device cuda --arena-mb 34000
                                 --settings elastic k24 k40 k64 k92 k128 --seconds 30 --long-tokens 65536
                                 --prefill 8192 32768 --prefill-at 40 --max-running 64 --step-tokens 2048 --no-replay
    python -m benchmarks.elastic --settings --prefill 8192 32768 --prefill-at 40 ...   (prompts beside streams only)
    python -m benchmarks.elastic --merge PART.json PART.json ... --json FILE

Every row is a phase, in tokens a second (output, and prompts as far as they were computed): ``elastic``, and ``k<n>``
for n resident experts a layer in the same arena. All run on one engine with the same clients, elastic first, then
falling numbers; prefixes are forgotten in between, places stay warm. A phase whose longest request a fixed K leaves no
room brings it 0. Parts of a run may be measured apart and merged; each should have ``elastic`` or be one's rest.

``max_stall_ms``: of the decode steps that banned places, or stood behind a pass that did, the worst one's time beyond
its in-layer limit: calm steps of as many rows and tokens, and the link's time for its own misses; the notes say what
the worst ten contained. ``wrong_tokens``: of the elastic run's recorded steps, replayed with all experts resident;
``--replay-seconds`` replays a round of shorter phases ahead of the run in its place.
``k_recovered_s``: from the burst's end until places are back at 95 % of before. ``prefill.t<n>``: a prompt of n tokens
beside 4 streams at ``--prefill-at`` experts a layer; ``share`` is max(compute, missing bytes / link) over its time to
the first token, compute being that time with all experts resident (``compute_misses``: how many were not);
``link_busy`` counts what the streams missed
meanwhile too; ``itl_p99_ratio`` the streams' gaps meanwhile over their undisturbed ones.

With a shape's random weights each stream's experts are imposed (``benchmarks.elasticity.routing``). On a CPU missing
experts are read at no price, so there a link is simulated, and steps cost modelled seconds
(``benchmarks.elasticity.link``); stalls alone are processor time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elasticity.merge import merge_parts
from benchmarks.elasticity.phases import Phase, PhaseLog, Prompt, recovered_s
from benchmarks.elasticity.prefill import NUM_STREAMS, PrefillTimes
from benchmarks.elasticity.routing import ImposedRouting, Routing
from benchmarks.elasticity.stage import Run, Setup, Stage, count_wrong
from benchmarks.elasticity.stalls import Machine, StepFacts, find_stalls
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import cut_folder
from worker.config import WorkerConfig
from worker.scheduling.recording import RecordedStep

Row = dict[str, Value]
ELASTIC = "elastic"
ASKED_SECONDS = 30.0
"""Phases of a full run; shorter ones call themselves reduced."""
MOST_STEPS = 1 << 30
WORST_STALLS = 10
ROOM_TOKENS = 1024
"""Beyond the longest prompt."""


def make_prompt(folder: Path, real: bool, vocab_size: int, longest: int) -> Prompt:
    """Pieces of this repository's texts in the model's tokens, or random ids for a shape without a tokenizer."""
    if not real:
        return lambda dice, length: tuple(dice.randrange(1000, vocab_size) for _ in range(length))
    from benchmarks.cpu_reference import sample_prompts

    text = sample_prompts(folder, [4 * longest], seed=1)[0]

    def piece(dice: random.Random, length: int) -> tuple[int, ...]:
        start = dice.randrange(len(text) - length)
        return text[start : start + length]

    return piece


def make_phases(seconds: float, longest: int, chats: int, longs: int) -> tuple[Phase, ...]:
    """Short chats; a burst of long prompts; short chats; both."""
    lengths = (longest // 2, longest)
    return (
        Phase("chats_before", seconds, chats=chats),
        Phase("burst", seconds, longs=longs, long_tokens=lengths),
        Phase("chats_after", seconds, chats=chats),
        Phase("mixed", seconds, chats=chats, longs=max(1, longs // 3), long_tokens=lengths),
    )


def make_setup(options: argparse.Namespace) -> Setup:
    """What the options ask for."""
    folder = cut_folder(options.model, options.format, options.layers)
    real = options.model == "demo"
    on_cpu = options.device == "cpu"
    longest = max(options.long_tokens, *options.prefill, 0)
    config = WorkerConfig(
        model=str(folder),
        served_name=options.model,
        device=options.device,
        load="checkpoint" if real else "random",
        experts="paged",
        arena_bytes=options.arena_mb * 1_000_000,
        max_model_len=0 if real else longest + ROOM_TOKENS,
        max_running=options.max_running,
        pass_tokens=options.pass_tokens,
        max_step_tokens=options.step_tokens,
        num_threads=1 if on_cpu else 0,
    )
    vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    return Setup(
        config,
        make_phases(options.seconds, options.long_tokens, options.chats, options.longs),
        make_prompt(folder, real, vocab_size, longest),
        options.link_mb_per_s * 1e6 if on_cpu else 0.0,
        None if real else ImposedRouting(options.max_running),
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = report_parser(__doc__)
    parser.add_argument("--model", default="demo", help="demo, or a shipped shape with random weights")
    parser.add_argument("--layers", type=int, default=0, help="so many of a shape's layers only")
    parser.add_argument("--format", default="bf16", help="of a shape's experts: bf16, fp8, int4, mxfp4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arena-mb", type=int, default=30)
    parser.add_argument("--settings", nargs="*", default=[ELASTIC, "k8", "k16", "k24"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase")
    parser.add_argument("--chats", type=int, default=4, help="clients that talk")
    parser.add_argument("--longs", type=int, default=6, help="clients of a burst")
    parser.add_argument("--long-tokens", type=int, default=2400, help="longest prompts")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--pass-tokens", type=int, default=512, help="of a prefill pass; 0: prompts in steps")
    parser.add_argument("--link-mb-per-s", type=float, default=400.0, help="simulated, on a CPU")
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024], help="prompts that are timed")
    parser.add_argument("--prefill-at", type=int, default=16, help="experts a layer meanwhile")
    parser.add_argument("--no-replay", action="store_true", help="do not count wrong tokens")
    parser.add_argument("--replay-steps", type=int, default=MOST_STEPS, help="so many of the elastic run's")
    parser.add_argument(
        "--replay-seconds",
        type=float,
        default=0.0,
        help="replay a round of so short phases, not the elastic run",
    )
    parser.add_argument("--merge", type=Path, nargs="+", help="only put these reports together")
    found: argparse.Namespace = parser.parse_args(arguments)
    return found


@dataclass
class Found:
    """What was measured: a run by setting, prompts' times by experts a layer, and the sizes of the model."""

    runs: dict[str, Run] = field(default_factory=dict)
    prefills: dict[int, list[PrefillTimes | None]] = field(default_factory=dict)
    facts: list[StepFacts] = field(default_factory=list)
    machine: Machine = field(default_factory=Machine)
    num_layers: int = 0
    num_experts: int = 0
    place_bytes: int = 0
    link_bytes_per_s: float = 0.0
    started_s: float = 0.0


def measure(
    setup: Setup, options: argparse.Namespace, save: Callable[[Found], None]
) -> tuple[Found, list[RecordedStep], Routing | None]:
    """All settings in turn on one engine, which is closed behind them, the elastic run's steps, and what routing was
    imposed."""
    found = Found()
    wanted = list(options.settings)
    with closing(Stage(setup, keep=not options.no_replay)) as stage:
        found.num_layers, found.place_bytes = stage.num_layers, stage.place_bytes
        found.num_experts = stage.engine.model.num_experts
        found.link_bytes_per_s, found.started_s = stage.link_bytes_per_s, stage.started_s
        found.machine = stage.machine
        print(f"started in {stage.started_s:.1f} s", flush=True)
        if ELASTIC in wanted:
            if stage.recorder.keep and options.replay_seconds:
                stage.rehearse(options.replay_seconds)
            found.runs[ELASTIC] = stage.run()
            found.facts = list(stage.recorder.facts)
            tell(ELASTIC, found.runs[ELASTIC])
            save(found)
        fixed = {int(name.removeprefix("k")) for name in wanted if name != ELASTIC}
        timed = {options.prefill_at, found.num_experts} if options.prefill else set()
        for count in sorted(fixed | timed, reverse=True):
            stage.fix_places(count)
            if count in timed:
                found.prefills[count] = stage.time_prefills(options.prefill)
                print(f"k{count}: {found.prefills[count]}", flush=True)
                stage.fix_places(count)
            if count in fixed:
                found.runs[f"k{count}"] = stage.run()
                tell(f"k{count}", found.runs[f"k{count}"])
            save(found)
    return found, stage.recorder.steps, stage.routing


def tell(name: str, run: Run) -> None:
    """A run's rates at once: the rest may be cut off."""
    found = zip(run.logs, run.rates, strict=True)
    rates = (f"{log.name} {rate:.0f} ({mean_places(run, log):.0f} places)" for log, rate in found)
    print(f"{name}: tokens/s {', '.join(rates)}", flush=True)


def prefill_rows(found: Found, lengths: Sequence[int], num_experts: int) -> list[Row]:
    """A row for each length at ``num_experts`` a layer, and one for the streams' pace at its worst."""
    rows: list[Row] = []
    worst = 0.0
    full_times: Sequence[PrefillTimes | None] = found.prefills.get(found.num_experts, [None] * len(lengths))
    for length, timed, full in zip(lengths, found.prefills.get(num_experts, []), full_times, strict=False):
        if timed is None:
            continue
        row: Row = {"phase": f"prefill.t{length}", "ttft_ms": 1e3 * timed.ttft_s}
        link_s = timed.read * found.place_bytes / found.link_bytes_per_s
        row["link_ms"] = 1e3 * link_s
        beside_s = timed.beside * found.place_bytes / found.link_bytes_per_s
        row["link_busy"] = (link_s + beside_s) / timed.ttft_s
        if full is not None:
            row["compute_ms"] = 1e3 * full.ttft_s
            row["compute_misses"] = full.read
            row["share"] = max(full.ttft_s, link_s) / timed.ttft_s
        rows.append(row)
        worst = max(worst, timed.busy_p99_s / timed.calm_p99_s)
    return [*rows, {"phase": "prefill", "itl_p99_ratio": worst}] if rows else []


def elastic_row(found: Found, wrong_tokens: int | None) -> Row:
    """The figures of the elastic run alone."""
    run = found.runs[ELASTIC]
    stalls = find_stalls(found.facts, found.machine)
    return {
        "phase": "all",
        "max_stall_ms": 1e3 * stalls[0].seconds if stalls else 0.0,
        "banning_steps": len(stalls),
        "k_recovered_s": recovered_s(run.places, run.logs[1]),
        "k_least": least_places(run, run.logs[1]) / found.num_layers,
        "k_before": mean_places(run, run.logs[0]) / found.num_layers,
        "exchanged_mb": sum(fact.banned_bytes for fact in found.facts) / 1e6,
        "wrong_tokens": wrong_tokens,
    }


def report_rows(found: Found, phases: Sequence[Phase], more: Sequence[Row]) -> list[Row]:
    """All rows with all columns, those of other rows empty."""
    rows: list[Row] = []
    for at, phase in enumerate(phases if found.runs else ()):
        by_setting = {name: run.rates[at] for name, run in found.runs.items()}
        rows.append({"phase": phase.name, **by_setting, **versus_best(by_setting)})
    rows += more
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def versus_best(by_setting: Mapping[str, float]) -> Row:
    """Elastic over the best fixed K of a phase; nothing where either is missing."""
    best = max((rate for name, rate in by_setting.items() if name != ELASTIC), default=0.0)
    return {"vs_best": by_setting[ELASTIC] / best} if best and ELASTIC in by_setting else {}


def conditions_of(options: argparse.Namespace) -> Conditions:
    """Under which the figures hold."""
    real = options.model == "demo"
    layers = f", {options.layers} layers" if options.layers else ""
    reduced = f"; reduced: phases of {options.seconds:g} s" if options.seconds < ASKED_SECONDS else ""
    batch = f"{options.chats} chats, {options.longs} long prompts at once{reduced}"
    context = f"chats to about 500 tokens; prompts of {options.long_tokens // 2}-{options.long_tokens}"
    if not options.settings:
        batch, context = f"a prompt beside {NUM_STREAMS} streams", "as named"
    return Conditions(
        model=f"{options.model}{layers}, experts in {options.format}, arena of {options.arena_mb} MB",
        weights="trained" if real else "random",
        prompts="pieces of this repository's texts" if real else "random ids; experts imposed, calibrated",
        cache="prefix cache on, cold; experts warmed by chats; conversations of 4 turns",
        batch=batch,
        context=context,
        resident="elastic, and K fixed as named, in falling order on one engine",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and publishes."""
    options = parse(arguments)
    if options.merge:
        publish(merge_parts([json.loads(path.read_text()) for path in options.merge]), options.json)
        return
    setup = make_setup(options)

    def save(found: Found) -> None:
        """Each setting's figures at once: the rest may be cut off."""
        if options.json is not None and (found.runs or options.prefill_at in found.prefills):
            options.json.write_text(make_report(options, setup, found, None).as_json())

    found, steps, routing = measure(setup, options, save)
    replays = ELASTIC in found.runs and not options.no_replay
    wrong = count_wrong(setup, steps[: options.replay_steps], routing) if replays else None
    publish(make_report(options, setup, found, wrong), options.json)


def make_report(options: argparse.Namespace, setup: Setup, found: Found, wrong_tokens: int | None) -> Report:
    """What was found so far."""
    more = prefill_rows(found, options.prefill, options.prefill_at)
    if ELASTIC in found.runs:
        more.append(elastic_row(found, wrong_tokens))
    notes = [
        f"{options.seconds:g} s a phase; one engine, started in {found.started_s:.1f} s",
        f"experts come at {found.link_bytes_per_s / 1e9:.2f} GB/s"
        + ("; link simulated, computing modelled" if setup.link_bytes_per_s else ""),
    ]
    if wrong_tokens is not None and options.replay_steps < MOST_STEPS and not options.replay_seconds:
        notes.append(f"wrong_tokens: of the first {options.replay_steps} steps of the elastic run")
    notes += found.machine.lines()
    if options.replay_seconds:
        notes.append(f"wrong_tokens: of a round of phases of {options.replay_seconds:g} s ahead of the run")
    notes += stall_notes(found.facts, found.machine)
    rows = report_rows(found, setup.phases, more)
    return Report("elastic", conditions_of(options), tuple(rows), tuple(notes))


def stall_notes(facts: Sequence[StepFacts], machine: Machine) -> list[str]:
    """What the worst steps contained."""
    stalls, calm = find_stalls(facts, machine), find_stalls(facts, machine, calm=True)
    if not stalls or not calm:
        return []
    usual = (
        f"the worst {1e3 * calm[0].seconds:+.2f} ms, of a hundred {1e3 * calm[len(calm) // 100].seconds:+.2f}"
    )
    return [
        f"{len(facts)} decode steps, {len(calm)} calm ({usual}), {len(stalls)} of the others banned places; the worst:",
        *(stall.line() for stall in stalls[:WORST_STALLS]),
    ]


def least_places(run: Run, log: PhaseLog) -> float:
    """Fewest expert places in a phase."""
    return min((count for at, count in run.places if log.began_s <= at < log.ended_s), default=0.0)


def mean_places(run: Run, log: PhaseLog) -> float:
    """Expert places in the second half of a phase."""
    middle = (log.began_s + log.ended_s) / 2
    found = [count for at, count in run.places if middle <= at < log.ended_s]
    return sum(found) / max(1, len(found))


if __name__ == "__main__":
    main()
