"""Sets expert places that follow use against a fixed number of them: chats, a burst of long prompts, chats, both.

    python -m benchmarks.elastic [--model demo --format bf16 --device cpu --arena-mb 28 --fixed 8,16,24 --seconds 8]
                                 [--link-mb-per-s 400] [--pass-tokens 512] [--no-replay] [--json FILE]
    python -m benchmarks.elastic --model qwen3-30b-a3b --format fp8 --device cuda --arena-mb 34000
                                 --fixed 24,40,64,92,128 --seconds 30 --long-tokens 65536 --prefill 8192,32768
                                 --pass-tokens 16384 --step-tokens 2048 --max-running 64 --no-replay

Every row is a phase, in tokens a second (prompt and output): ``elastic``, and ``k<n>`` for n resident experts a layer
in the same arena. All run the same engine with the same clients; a fixed K that leaves the longest request no room is
0. ``max_stall_ms``: the worst step that banned places, beyond calm steps of as many rows, link time apart.
``wrong_tokens``: of the elastic run's recorded steps, replayed with all experts resident. ``k_recovered_s``: from the
burst's end until places are back at 95 % of before. ``prefill.t<n>``: a prompt of n tokens beside 4 streams at the
second smallest K; ``share`` is max(compute, missing bytes / link) over its time to the first token, compute being that
time with all experts resident; ``itl_p99_ratio`` the streams' gaps meanwhile over their undisturbed ones.

On a CPU missing experts are read at no price, so there a link of ``--link-mb-per-s`` is simulated: steps wait for the
bytes that they read over it, layers of a pass for those of the ring; seconds are the loop thread's processor time plus
those waits, whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.elasticity.link import LinkedRunner
from benchmarks.elasticity.phases import Clock, Driver, Phase, PhaseLog, Prompt, recovered_s
from benchmarks.elasticity.prefill import PrefillTimes, time_prefill
from benchmarks.elasticity.stalls import StepFacts, max_stall_s
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import shape_folder
from memory.device.residency import Lane
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.errors import ConfigError, PromptTooLong
from worker.execution.runner import ModelRunner
from worker.models.paged import table_experts
from worker.scheduling.recording import RecordedStep
from worker.scheduling.step import StepPlan, StepResult

Row = dict[str, Value]


@dataclass(frozen=True)
class Setup:
    """What all runs share. ``link_bytes_per_s`` 0: the machine's own link."""

    config: WorkerConfig
    phases: tuple[Phase, ...]
    prompt: Prompt
    link_bytes_per_s: float


@dataclass
class Run:
    """One run over all phases."""

    logs: list[PhaseLog]
    places: list[tuple[float, float]]
    facts: list[StepFacts]
    steps: list[RecordedStep]
    num_layers: int
    num_experts: int
    place_bytes: int
    link_bytes_per_s: float

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of places that were banned while decode steps ran."""
        return sum(fact.banned_bytes for fact in self.facts)


class Recorder:
    """Told of each step: keeps what stalls are judged by, and the steps themselves where they are to be replayed."""

    def __init__(self, keep: bool) -> None:
        self.steps: list[RecordedStep] = []
        self.runner: ModelRunner | None = None
        self.clock: Clock = time.monotonic
        self._keep = keep
        self._decoded: list[tuple[int, float, int, torch.Tensor]] = []

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """One step."""
        if self._keep:
            self.steps.append(RecordedStep(plan, result))
        pager = None if self.runner is None else self.runner.pager
        if pager is None or not plan.num_rows or plan.num_rows != plan.num_decode_rows:
            return
        # A sum on the device: on a GPU nobody waits for it, and it may count the step launched behind this one.
        read = pager.residency.counts[[Lane.TEE, Lane.IN_PLACE]].sum()
        banned = sum(entry.last - entry.first for entry in plan.commands.ban)
        self._decoded.append((plan.num_rows, result.seconds, banned, read))

    def facts(self, place_bytes: int) -> list[StepFacts]:
        """The decode steps so far."""
        found, before = [], 0
        for rows, seconds, banned, total in self._decoded:
            read = int(total)
            found.append(StepFacts(rows, seconds, (read - before) * place_bytes, banned * place_bytes))
            before = read
        return found


def open_engine(setup: Setup, config: WorkerConfig, recorder: Recorder) -> NativeEngine:
    """An engine under ``config`` whose market knows the link."""

    def make(given: WorkerConfig) -> ModelRunner:
        linked = setup.link_bytes_per_s and given.experts == "paged"
        recorder.runner = LinkedRunner(given, setup.link_bytes_per_s) if linked else ModelRunner(given)
        return recorder.runner

    engine = NativeEngine(config, make, record=recorder)
    runner, experts = recorder.runner, engine.experts
    if isinstance(runner, LinkedRunner) and experts is not None:
        recorder.clock = experts.clock = runner.clock
    return engine


def link_of(recorder: Recorder) -> float:
    """Bytes a second at which missing experts come: measured at start, or simulated."""
    assert recorder.runner is not None
    pager = recorder.runner.pager
    assert pager is not None
    assert pager.link is not None
    return pager.link.bytes_per_s


def run_phases(setup: Setup, config: WorkerConfig, keep: bool = False) -> Run:
    """All phases on a fresh engine."""
    recorder = Recorder(keep)
    with closing(open_engine(setup, config, recorder)) as engine:
        driver = Driver(engine, setup.prompt, recorder.clock)
        logs = asyncio.run(driver.run(setup.phases))
        runner = recorder.runner
        assert runner is not None
        assert runner.pager is not None
        host = runner.pager.host
        link = link_of(recorder)
        return Run(
            logs,
            driver.places,
            recorder.facts(host.place_bytes),
            recorder.steps,
            len(host.layers),
            host.num_experts,
            host.place_bytes,
            link,
        )


def run_fixed(setup: Setup, num_experts: int, elastic: Run) -> list[float]:
    """Tokens a second by phase with ``num_experts`` a layer resident; 0 where memory is too small for that."""
    num_bytes = num_experts * elastic.num_layers * elastic.place_bytes
    try:
        run = run_phases(setup, replace(setup.config, expert_bytes=num_bytes))
    except (ConfigError, PromptTooLong) as error:
        print(f"k{num_experts}: {error}")
        return [0.0] * len(setup.phases)
    return [log.tokens_per_s for log in run.logs]


def count_wrong(setup: Setup, steps: Sequence[RecordedStep]) -> int:
    """Tokens of recorded steps that differ when all experts are resident, the kernel being the same."""
    config = replace(setup.config, experts="resident", expert_bytes=0, pass_tokens=0)
    factory = partial(table_experts, deterministic=config.deterministic)
    runner = ModelRunner(config, factory)
    runner.attach_memory(runner.page_specs, config.arena_bytes)
    wrong = 0
    for step in sorted(steps, key=lambda step: step.plan.step):
        wrong += int((runner.run(step.plan).token_ids != step.result.token_ids).sum())
    return wrong


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
    folder = shape_folder(options.model, options.format)
    real = options.model == "demo"
    on_cpu = options.device == "cpu"
    config = WorkerConfig(
        model=str(folder),
        served_name=options.model,
        device=options.device,
        load="checkpoint" if real else "random",
        experts="paged",
        arena_bytes=options.arena_mb * 1_000_000,
        max_running=options.max_running,
        pass_tokens=options.pass_tokens,
        max_step_tokens=options.step_tokens,
        num_threads=1 if on_cpu else 0,
    )
    vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    prompt = make_prompt(folder, real, vocab_size, options.long_tokens)
    phases = make_phases(options.seconds, options.long_tokens, options.chats, options.longs)
    return Setup(config, phases, prompt, options.link_mb_per_s * 1e6 if on_cpu else 0.0)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = report_parser(__doc__)
    parser.add_argument("--model", default="demo", help="demo, or a shipped shape with random weights")
    parser.add_argument("--format", default="bf16", help="of a shape's experts: bf16, fp8, int4, mxfp4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arena-mb", type=int, default=28)
    parser.add_argument("--fixed", default="8,16,24", help="numbers of experts a layer")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase")
    parser.add_argument("--chats", type=int, default=4, help="clients that talk")
    parser.add_argument("--longs", type=int, default=6, help="clients of a burst")
    parser.add_argument("--long-tokens", type=int, default=2400, help="longest prompts")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--pass-tokens", type=int, default=512, help="of a prefill pass; 0: prompts in steps")
    parser.add_argument("--link-mb-per-s", type=float, default=400.0, help="simulated, on a CPU")
    parser.add_argument(
        "--prefill", default="1024,4096", help="prompts whose first token is timed; empty: none"
    )
    parser.add_argument("--no-replay", action="store_true", help="do not count wrong tokens")
    found: argparse.Namespace = parser.parse_args(arguments)
    return found


def measure_prefills(setup: Setup, lengths: Sequence[int], num_experts: int, elastic: Run) -> list[Row]:
    """A row for each length at ``num_experts`` a layer, and one for the streams' pace at its worst."""
    times, fastest = [
        time_prefills(setup, lengths, count * elastic.num_layers * elastic.place_bytes)
        for count in (num_experts, elastic.num_experts)
    ]
    rows: list[Row] = []
    for length, found, full in zip(lengths, times.found, fastest.found, strict=True):
        link_s = found.read * elastic.place_bytes / times.link_bytes_per_s
        share = max(full.ttft_s, link_s) / found.ttft_s
        rows.append({"phase": f"prefill.t{length}", "ttft_ms": 1e3 * found.ttft_s, "share": share})
    worst = max(found.busy_p99_s / found.calm_p99_s for found in times.found)
    return [*rows, {"phase": "prefill", "itl_p99_ratio": worst}]


@dataclass(frozen=True)
class Prefills:
    """Times by length, and the link that they had."""

    found: list[PrefillTimes]
    link_bytes_per_s: float


def time_prefills(setup: Setup, lengths: Sequence[int], expert_bytes: int) -> Prefills:
    """All lengths on one engine with ``expert_bytes`` of places, an arena that holds them beside the longest prompt."""
    recorder = Recorder(keep=False)
    arena_bytes = setup.config.arena_bytes + expert_bytes
    config = replace(setup.config, expert_bytes=expert_bytes, arena_bytes=arena_bytes, prefix_cache=False)
    with closing(open_engine(setup, config, recorder)) as engine:
        assert recorder.runner is not None
        pager = recorder.runner.pager
        assert pager is not None
        lanes = [Lane.STAGED, Lane.PREFILL_IN_PLACE]

        def read_so_far() -> int:
            return int(pager.residency.counts[lanes].sum())

        async def every() -> list[PrefillTimes]:
            return [
                await time_prefill(engine, setup.prompt, recorder.clock, length, read_so_far, seed)
                for seed, length in enumerate(lengths)
            ]

        found = asyncio.run(every())
        link = link_of(recorder)
    return Prefills(found, link)


def report_rows(
    elastic: Run, rates: Mapping[str, list[float]], more: Sequence[Row], summary: Row
) -> list[Row]:
    """All rows with all columns, those of other rows empty."""
    rows: list[Row] = []
    for at, log in enumerate(elastic.logs):
        by_k = {name: found[at] for name, found in rates.items()}
        best = max(by_k.values(), default=0.0)
        share = log.tokens_per_s / best if best else None
        rows.append({"phase": log.name, "elastic": log.tokens_per_s, **by_k, "vs_best": share})
    rows += [*more, summary]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def conditions_of(options: argparse.Namespace, setup: Setup) -> Conditions:
    """Under which the figures hold."""
    real = options.model == "demo"
    return Conditions(
        model=f"{options.model}, experts in {options.format}, arena of {options.arena_mb} MB",
        weights="trained" if real else "random",
        prompts="pieces of this repository's texts" if real else "random ids",
        cache="cold at the start, prefix cache on; conversations of 4 turns",
        batch=f"{options.chats} chats, {options.longs} long prompts at once",
        context=f"chats to about 500 tokens; prompts of {options.long_tokens // 2}-{options.long_tokens}",
        resident=f"elastic; fixed {options.fixed} a layer",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and publishes."""
    options = parse(arguments)
    setup = make_setup(options)
    fixed = [int(part) for part in options.fixed.split(",") if part]
    elastic = run_phases(setup, setup.config, keep=not options.no_replay)
    rates = {f"k{count}": run_fixed(setup, count, elastic) for count in fixed}
    lengths = [int(part) for part in options.prefill.split(",") if part]
    more = measure_prefills(setup, lengths, sorted(fixed)[1], elastic) if lengths and len(fixed) > 1 else []
    summary: Row = {
        "phase": "all",
        "max_stall_ms": 1e3 * max_stall_s(elastic.facts, elastic.link_bytes_per_s),
        "k_recovered_s": recovered_s(elastic.places, elastic.logs[1]),
        "k_least": least_places(elastic, elastic.logs[1]) / elastic.num_layers,
        "k_before": mean_places(elastic, elastic.logs[0]) / elastic.num_layers,
        "exchanged_mb": elastic.exchanged_bytes / 1e6,
        "wrong_tokens": None if options.no_replay else count_wrong(setup, elastic.steps),
    }
    notes = [f"{options.seconds:g} s a phase, longer by what was under way at its end"]
    if setup.link_bytes_per_s:
        notes.append(f"link simulated: {options.link_mb_per_s:g} MB/s; seconds are processor time and link")
    rows = report_rows(elastic, rates, more, summary)
    publish(Report("elastic", conditions_of(options, setup), tuple(rows), tuple(notes)), options.json)


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
