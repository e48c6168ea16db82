"""Times the native engine on a CPU against stock transformers: same threads, same float32 weights, one run.

    python -m benchmarks.cpu_serving [--model FOLDER] [--threads 1] [--json FILE]

``batch1_ratio``: one request, ours over transformers. At 16 prompts of 128 tokens: ``aggregate16_ratio`` over
transformers one after the other, ``batch16_ratio`` over its own left-padded batch. ``mixed16_ratio``: 16 prompts of
20-1,500 tokens over transformers one after the other. Ratios are of decode rates (``all``); those of prefill rates, of
whole runs, and of decode rates at the lower quartile of step times (for machines with other work) have their own rows.
The reference runs bare cached forward passes, which is faster than its ``generate``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cpu_accuracy import draw_lengths
from benchmarks.cpu_engine import StepClock
from benchmarks.cpu_profile import profile_decode
from benchmarks.cpu_reference import ROOT, Timing, sample_prompts, time_reference
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from demo.packing import restore
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

AT_ONCE = 16
PROMPT_TOKENS = 128


def one_by_one(folder: Path, prompts: Sequence[Sequence[int]], num_new: int) -> Timing:
    """The reference, one prompt after the other."""
    found = time_reference(folder, prompts[:1], num_new)
    for prompt in prompts[1:]:
        found = found.joined(time_reference(folder, [prompt], num_new))
    return found


def open_engine(folder: Path, threads: int, clock: StepClock) -> NativeEngine:
    """The engine as it serves, without prefix cache, so that every prompt is computed."""
    return NativeEngine(
        WorkerConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            max_running=AT_ONCE,
            max_step_tokens=2048,
            prefix_cache=False,
            num_threads=threads,
        ),
        record=clock.record,
    )


def best_of(runs: Sequence[Timing]) -> Timing:
    """The run with the least time: the others met the machine's other work."""
    return min(runs, key=lambda run: run.total_s)


@dataclass(frozen=True)
class Duel:
    """One figure: our run and the reference's, of equal work per token."""

    name: str
    ours: Timing
    reference: Timing

    @property
    def ratios(self) -> dict[str, float]:
        """Ours over the reference: by prefill rates, by decode rates at the lower quartile of steps, by whole runs,
        and (``all``) by decode rates."""
        ours, reference = self.ours, self.reference
        return {
            "prefill": ours.prefill_rate / reference.prefill_rate,
            "quartile": ours.step_rate / reference.step_rate,
            "whole": (reference.total_s / reference.prefill_tokens) / (ours.total_s / ours.prefill_tokens),
            "all": ours.decode_rate / reference.decode_rate,
        }

    def __str__(self) -> str:
        ours, reference = self.ours, self.reference
        return (
            f"{self.name:18} decode {ours.decode_rate:8.1f} against {reference.decode_rate:8.1f} tokens/s,"
            f"  prefill {ours.prefill_rate:8.1f} against {reference.prefill_rate:8.1f} tokens/s"
        )


def as_rows(duels: Sequence[Duel]) -> tuple[dict[str, Value], ...]:
    """A row per kind of ratio, a column per figure."""
    ratios = {duel.name: duel.ratios for duel in duels}
    kinds = next(iter(ratios.values()))
    return tuple({"by": kind, **{name: found[kind] for name, found in ratios.items()}} for kind in kinds)


def measure(
    folder: Path, engine: NativeEngine, clock: StepClock, num_new: int, repeats: int, seed: int
) -> list[Duel]:
    """All four comparisons; reference and engine take turns."""
    short = sample_prompts(folder, [PROMPT_TOKENS] * AT_ONCE, seed)
    mixed = sample_prompts(folder, draw_lengths(AT_ONCE, random.Random(seed)), seed)
    time_reference(folder, short[:1], 4)
    clock.time(engine, short[:1], 4)
    runs: dict[str, list[Timing]] = {}
    for repeat in range(repeats):
        # Taking turns, so that the machine's other work meets both alike.
        runs.setdefault("single", []).append(time_reference(folder, short[:1], num_new))
        runs.setdefault("alone", []).append(clock.time(engine, short[:1], num_new))
        runs.setdefault("sequential", []).append(one_by_one(folder, short[:4], num_new))
        runs.setdefault("together", []).append(clock.time(engine, short, num_new))
        runs.setdefault("batch", []).append(time_reference(folder, short, num_new))
        runs.setdefault("mixed", []).append(clock.time(engine, mixed, num_new))
        if repeat == 0:
            runs["mixed sequential"] = [one_by_one(folder, mixed, num_new)]
    best = {name: best_of(timings) for name, timings in runs.items()}
    return [
        Duel("batch1_ratio", best["alone"], best["single"]),
        Duel("aggregate16_ratio", best["together"], best["sequential"]),
        Duel("batch16_ratio", best["together"], best["batch"]),
        Duel("mixed16_ratio", best["mixed"], best["mixed sequential"]),
    ]


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    restore(options.model)
    torch.set_num_threads(options.threads)
    clock = StepClock()
    engine = open_engine(options.model, options.threads, clock)
    try:
        duels = measure(options.model, engine, clock, options.new_tokens, options.repeats, options.seed)
    finally:
        engine.close()
    prompts = sample_prompts(options.model, [PROMPT_TOKENS] * AT_ONCE, options.seed)
    conditions = Conditions(
        model="/".join(options.model.parts[-2:]),
        weights="as in the folder, computed in float32",
        prompts=f"pieces of the repository's licence, seed {options.seed}",
        cache="cold",
        batch=f"1 and {AT_ONCE}; {options.threads} threads",
        context=f"{PROMPT_TOKENS}, and 20-1500 tokens, + {options.new_tokens} new ones",
        resident="all",
    )
    shares = profile_decode(options.model, prompts, options.threads)
    notes = (
        "",
        *(str(duel) for duel in duels),
        "",
        f"A decode step of {AT_ONCE} rows, profiled:",
        *(str(share) for share in shares),
    )
    publish(Report("cpu_serving", conditions, as_rows(duels), notes), options.json)


if __name__ == "__main__":
    main()
