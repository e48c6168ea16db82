"""Sets the arena against fixed splits of the same bytes: real scheduler and ledger, simulated device, no GPU.

    python -m benchmarks.arena_replay [--traces FOLDER] [--json FILE] [--pictures FOLDER] [--only NAME ...] [--jobs N]
                                      [--rates FILE]

Each case is one load on one model's memory geometry. The split shares its bytes in fixed parts (STATE and WINDOW
against FULL; paged experts against FULL), in a sweep of eleven ratios; arena and splits run the same scheduler. For
the published loads the budget is the one at which the split shows the published figure. Step times come from
``benchmarks.replay.step_time``; all seconds are simulated, so the machine's speed and load do not matter. The rates
behind them are read from ``--rates`` (by default ``benchmarks/results/h200/step_overhead.json``, where that file is):
its figures ``step_base_us``, ``step_row_us`` (or ``launch_us_per_layer``), ``prefill_flops_share``,
``attention_bandwidth_share``, ``weight_bandwidth_share`` and ``link_gb_per_s``, as ``benchmarks.replay.rates``
explains; what it does not hold is assumed. One is not taken from there: the time per layer is the one at which the
split shows the published throughput in ample memory, because the published figures that budgets are calibrated to are
taken to be that engine's; ``16k_4k`` is shown at this engine's own rates as well. Each rate is printed with its source.
All cases take ten minutes on one core (569 s beside other work), ``--only 16k_4k`` half a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.replay import rates as machine
from benchmarks.replay import settling, step_time
from benchmarks.replay.cases import RATIOS, TRACE_JOBS, Case, published_cases, trace_cases
from benchmarks.replay.rates import Rates
from benchmarks.replay.simulator import Outcome
from benchmarks.replay.sweep import Comparison, calibrate, calibrate_overhead, compare, run_one

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
PLACES = 5
"""Significant figures written."""


def run_case(name: str, traces: Path, rates: Rates) -> Comparison:
    """Calibrates and compares one case, by name."""
    case = next(replace(case, rates=rates) for case in all_cases(traces) if case.name == name)
    arena_bytes, found = calibrate(case)
    return compare(case, arena_bytes, found)


def run_own(rates: Rates) -> dict[str, float]:
    """Split and arena of the load that the arena gains most by, at this engine's own rates."""
    case = next(replace(case, rates=rates) for case in published_cases() if case.load_name == "16k_4k")
    arena_bytes, _ = calibrate(case)
    split = run_one(case, arena_bytes, "split", case.split_ratio)
    arena = run_one(case, arena_bytes, "arena", 0.5)
    return {
        f"{case.name}.own_rates.running_arena": arena.mean_running,
        f"{case.name}.own_rates.running_split": split.mean_running,
        f"{case.name}.own_rates.throughput_ratio": arena.tokens_per_s / split.tokens_per_s,
    }


def all_cases(traces: Path) -> list[Case]:
    """Every case, in order of the report."""
    return [*published_cases(), *trace_cases(traces)]


def statements(figures: Mapping[str, float]) -> dict[str, bool]:
    """What must hold, in words, and whether it does."""
    claims = {
        "16k_4k: at least 32 running": figures["qwen35_4b.16k_4k.running_arena"] >= 32,
        "16k_4k: 26 % more throughput": figures["qwen35_4b.16k_4k.throughput_ratio"] >= 1.26,
        "512_16k: at most 233 retractions per 1,000": figures["qwen35_4b.512_16k.retractions_arena"] <= 233,
        "max_concurrency: about 1,000 running": figures["gpt_oss_20b.max_concurrency.running_arena"] >= 950,
        "max_concurrency: first token in a fifth of the time": (
            figures["gpt_oss_20b.max_concurrency.ttft_p50_arena"]
            <= figures["gpt_oss_20b.max_concurrency.ttft_p50_split"] / 5
        ),
        "1k_256, ample memory: within 1 %": abs(figures["qwen35_4b.1k_256.throughput_ratio"] - 1) <= 0.01,
        "expert places within 5 % of before, 30 s after a burst": figures["burst.places_share_after_30s"]
        >= 0.95,
        "throughput back to 95 % after a retraction storm": figures["storm.throughput_share_after"] >= 0.95,
    }
    for name, value in figures.items():
        if name.endswith(".vs_best_split"):
            claims[f"{name.removesuffix('.vs_best_split')}: not 2 % below the best split"] = value >= 0.98
        if name.endswith(".vs_median_split"):
            claims[f"{name.removesuffix('.vs_median_split')}: not below the median split"] = value >= 0.995
        if name.endswith(".calibrated"):
            claims[f"{name.removesuffix('.calibrated')}: a budget that shows the published figure"] = (
                value == 1
            )
    return claims


def conditions(rates: Rates) -> dict[str, str | float]:
    """What the figures depend on."""
    return {
        "hardware": "none: one H200 as a step-time model",
        **rates.described(),
        "expert popularity exponent (assumed)": step_time.POPULARITY,
        "output lengths": "unknown to the scheduler, which sees max_tokens only",
        "grain": "one simulated token stands for 8 to 32 real ones; bytes, lengths and times are real",
        "traces": ", ".join(
            f"{name}: first {n} at {x:g} times the pace" for name, (n, x) in TRACE_JOBS.items()
        ),
        "ratios": ", ".join(map(str, RATIOS)),
    }


def row(comparison: Comparison, mode: str, ratio: float, outcome: Outcome) -> dict[str, str | float]:
    """One run for the file."""
    return {
        "case": comparison.case.name,
        "mode": mode,
        "ratio": round(ratio, 4),
        "refused": outcome.refused,
        "peak_running": outcome.peak_running,
        "mean_running": _short(outcome.mean_running),
        "retractions": _short(outcome.retractions),
        "ttft_p50_s": _short(outcome.ttft_p50_s),
        "ttft_p95_s": _short(outcome.ttft_p95_s),
        "tokens_per_s": _short(outcome.tokens_per_s),
        "idle_share": _short(outcome.idle_share),
        "cached_share": _short(outcome.cached_share),
        "moves": outcome.moves,
        "moved_gb": _short(outcome.moved_bytes / 1e9),
        "steps": outcome.num_steps,
    }


def _short(value: float) -> float:
    return float(f"{value:.{PLACES}g}")


def report(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """All figures by full name, printed as they are gathered."""
    figures: dict[str, float] = {}
    for comparison in comparisons:
        for name, value in comparison.figures().items():
            figures[f"{comparison.case.name}.{name}"] = _short(value)
        if comparison.case.target is not None:
            figures[f"{comparison.case.name}.calibrated"] = float(comparison.calibrated)
    return figures


def main() -> int:
    """Runs the cases and judges them; 0 if everything holds that must."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of the bands per model")
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--rates", type=Path, default=machine.MEASURED, help="measured rates of the device")
    options = parser.parse_args()
    if not options.traces.is_dir():
        print(f"there are no traces in {options.traces}; --traces names the folder that holds them")
        return 2
    began = time.monotonic()
    own = machine.read_rates(options.rates)
    rates = calibrate_overhead(own)
    for name, described in rates.described().items():
        print(f"{name}: {described}")
    print(f"this engine's own: layer_s {own.layer_s:g}, row_s {own.row_s:g}")
    cases = all_cases(options.traces)
    names = [c.name for c in cases if not options.only or any(part in c.name for part in options.only)]
    with ProcessPoolExecutor(options.jobs) as pool:
        settled, ours = pool.submit(settling.measure, rates), pool.submit(run_own, own)
        running = [pool.submit(partial(run_case, traces=options.traces, rates=rates), name) for name in names]
        for done in as_completed(running):
            comparison = done.result()
            shown = "  ".join(f"{name} {value:.4g}" for name, value in comparison.figures().items())
            print(f"{comparison.case.name}: {shown}", flush=True)
        comparisons = [done.result() for done in running]
        others = {**settled.result(), **ours.result()}
        figures = report(comparisons) | {name: _short(value) for name, value in others.items()}
    for name, value in figures.items():
        print(f"{name} = {value:.6g}")
    failed = [] if options.only else [claim for claim, holds in statements(figures).items() if not holds]
    for claim in failed:
        print(f"FAILED {claim}")
    if options.pictures is not None:
        _draw(comparisons, options.pictures)
    if options.json is not None:
        _write(comparisons, figures, failed, rates, options.json)
    print(f"{sum(len(c.sweep) + 2 for c in comparisons)} runs in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _draw(comparisons: Sequence[Comparison], folder: Path) -> None:
    from benchmarks.replay import pictures

    folder.mkdir(parents=True, exist_ok=True)
    for model in {comparison.case.shape.name: None for comparison in comparisons}:
        mine = [comparison for comparison in comparisons if comparison.case.shape.name == model]
        pictures.draw(mine, folder / f"arena_replay_{model}.png")


def _write(
    comparisons: Sequence[Comparison],
    figures: Mapping[str, float],
    failed: Sequence[str],
    rates: Rates,
    path: Path,
) -> None:
    runs = []
    for comparison in comparisons:
        runs += [row(comparison, "split", ratio, outcome) for ratio, outcome in comparison.sweep.items()]
        runs.append(row(comparison, "split", comparison.case.split_ratio, comparison.split))
        runs.append(row(comparison, "arena", 0.0, comparison.arena))
    written = {
        "conditions": conditions(rates),
        "figures": dict(figures),
        "failed": list(failed),
        "runs": runs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
