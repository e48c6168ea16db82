"""Compares the placement policies with the usual rules on simulated fleets under the shared traces.

    python -m benchmarks.placement_sim [--traces FOLDER] [--json FILE] [--only EXPERIMENT ...]

The policies are those that a Router runs, unchanged. Workers are simulated (``benchmarks/placement/workers.py``): an
arena shared by requests, prefix pages and experts, an expert cache per worker, a model of step time. Figures are means
over two seeds; ``best_baseline`` is the best of all baselines in each figure. Exit code 1: a statement does not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.placement import experiments
from benchmarks.placement.experiments import Findings, Log, Run
from benchmarks.placement.experts import ExpertModel
from benchmarks.placement.workers import WorkerSpec

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "traces"
EXPERIMENTS = ("matrix", "stampede", "fleet_sizes", "deaths", "four_domains")


def conditions() -> dict[str, object]:
    """Everything that the figures depend on."""
    return {
        "hardware": f"simulated workers; the simulation ran on one core of {platform.machine()}",
        "worker": asdict(WorkerSpec()),
        "experts": asdict(ExpertModel()),
        "objective": asdict(experiments.OBJECTIVE),
        "traffic": [asdict(spec) for spec in experiments.MATRIX],
        "workers": 8,
        "staleness_s": list(experiments.STALENESS_S),
        "seeds": list(experiments.SEEDS),
    }


def show(run: Run) -> None:
    """One line for a run."""
    f = run.figures
    print(
        f"{run.experiment:28} {run.num_workers:2} workers {run.staleness_s:3g} s {run.rule:20} "
        f"goodput {f.goodput:7.3f}/s met {f.met_share:6.1%} ttft p50 {f.ttft_p50_ms:6.0f} p99 {f.ttft_p99_ms:7.0f} ms "
        f"itl p99 {f.itl_p99_ms:5.0f} ms paged {f.bytes_paged / 1e12:6.2f} TB retracted {f.retractions:3} "
        f"imbalance {f.imbalance:4.2f} share {f.max_share_2s:4.2f} lost {f.lost}",
        flush=True,
    )


def run_experiment(name: str, folder: Path, log: Log) -> Findings:
    """One experiment by name."""
    match name:
        case "matrix":
            return experiments.matrix(folder, log)
        case "stampede":
            return experiments.stampede(log)
        case "fleet_sizes":
            return experiments.fleet_sizes(folder, log)
        case "deaths":
            return experiments.deaths(folder, log)
        case "four_domains":
            return experiments.four_domains(folder, log)
        case _:
            raise ValueError(f"no experiment is named {name!r}; there are {', '.join(EXPERIMENTS)}")


def main() -> int:
    """Runs the experiments and judges them; 0 if everything holds that must."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the shared traces")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, help="some of the experiments"
    )
    options = parser.parse_args()
    began = time.monotonic()
    figures: dict[str, float] = {}
    runs: list[Run] = []
    for name in options.only:
        found = run_experiment(name, options.traces, show)
        figures |= found.figures
        runs += found.runs
    for name, value in figures.items():
        print(f"{name} = {value:.6g}")
    complete = tuple(options.only) == EXPERIMENTS
    failed = experiments.failed_statements(figures) if complete else []
    for sentence in failed:
        print(f"FAILED {sentence}")
    print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s")
    if options.json is not None:
        written = {
            "conditions": conditions(),
            "figures": {name: float(f"{value:.6g}") for name, value in figures.items()},
            "failed": failed,
            "runs": [asdict(run) for run in runs],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
