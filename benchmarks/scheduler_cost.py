"""Measures what one decode step costs the host: begin, schedule, commit, apply and end, without any model.

    python -m benchmarks.scheduler_cost [--json FILE] [--cpu-time]

The runner is a stub that answers with constant tokens; its own time is not counted. Each figure is the median, or
a tenth from either end, over steps in which every row decodes one token; page grants fall where they fall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.report import NOT_APPLICABLE, Conditions, Report, publish, report_parser
from memory.api import LayerRows, Ledger, PageKind, PageSpec, Row
from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.scheduling.ledgers import make_ledger
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import StepPlan, StepResult

PROMPT_TOKENS = 1024
ROW = Row("k", (4, 128), "bfloat16")
SPECS = (
    PageSpec("full", PageKind.FULL, 64, (LayerRows(0, (ROW,)),)),
    PageSpec("window128", PageKind.WINDOW, 64, (LayerRows(1, (ROW,)),), 128),
    PageSpec("state", PageKind.STATE, 1, (LayerRows(2, (Row("s", (16, 128, 128), "float32"),)),)),
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of host work per decode step with ``num_rows`` rows."""

    num_rows: int
    p10_ms: float
    median_ms: float
    p90_ms: float
    schedule_ms: float
    apply_ms: float


class _ConstantRunner:
    """Answers every sampling row with the same token."""

    def run(self, plan: StepPlan) -> StepResult:
        tokens = np.full((plan.num_rows, 1), 7, dtype=np.int64)
        return StepResult(plan.step, tokens, plan.samples.astype(np.int64))


def measure(
    num_rows: int, num_steps: int = 300, specs: Sequence[PageSpec] = SPECS, cpu_time: bool = False
) -> StepCost:
    """Cost of a decode step at ``num_rows`` requests of about 1,024 prompt tokens, over ``num_steps`` steps; wall time,
    or the CPU time of this thread."""
    clock = time.thread_time if cpu_time else time.perf_counter
    config = WorkerConfig(model="", max_running=num_rows, max_step_tokens=8192, prefix_cache=False)
    per_request = sum(spec.page_bytes * (1 if spec.page_tokens == 1 else 80) for spec in specs)
    ledger = make_ledger(config, specs, 2 * num_rows * per_request)
    scheduler = Scheduler(ledger, Limits(num_rows, 8192, 1 << 17, prefix_cache=False))
    prompt = tuple(range(PROMPT_TOKENS))
    for number in range(num_rows):
        # Lengths differ, so that page grants are spread over the steps as in a real batch.
        sampling = SamplingParams(max_tokens=4096, ignore_eos=True)
        scheduler.submit(GenerateRequest(str(number), prompt[: PROMPT_TOKENS - number % 64], sampling))
    runner, step = _ConstantRunner(), 0
    while len(scheduler.waiting) or (scheduler.rows.num_computed < scheduler.rows.num_prompt).any():
        _turn(ledger, scheduler, runner, step, clock)
        step += 1
    turns = [_turn(ledger, scheduler, runner, step + more, clock) for more in range(num_steps)]
    totals = sorted(sum(turn) for turn in turns)
    return StepCost(
        num_rows,
        round(1e3 * totals[len(totals) // 10], 3),
        round(1e3 * statistics.median(totals), 3),
        round(1e3 * totals[int(0.9 * len(totals))], 3),
        round(1e3 * statistics.median(turn[0] for turn in turns), 3),
        round(1e3 * statistics.median(turn[1] for turn in turns), 3),
    )


def _turn(
    ledger: Ledger, scheduler: Scheduler, runner: _ConstantRunner, step: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """One step in lock-step; seconds before the device could start, and after it is done."""
    start = clock()
    ledger.begin_step(step, step - 1)
    plan = scheduler.schedule(step)
    ledger.commit_step(step)
    planned = clock()
    result = runner.run(plan)
    done = clock()
    scheduler.apply(plan, result)
    ledger.end_step(step)
    return planned - start, clock() - done


def main() -> None:
    """Prints the table."""
    parser = report_parser(__doc__)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time: for machines with other load"
    )
    options = parser.parse_args()
    conditions = Conditions(
        model="three groups of pages: FULL and WINDOW 128 by 64 tokens, STATE",
        weights=NOT_APPLICABLE,
        prompts="token ids counted up",
        cache="no prefix cache",
        batch="64-1,000 decode rows in lock-step",
        context=f"{PROMPT_TOKENS - 63}-{PROMPT_TOKENS + 300} tokens",
        resident=NOT_APPLICABLE,
    )
    costs = [measure(num_rows, cpu_time=options.cpu_time) for num_rows in (64, 256, 1000)]
    clock = "CPU time of the thread" if options.cpu_time else "wall time"
    publish(
        Report("scheduler_cost", conditions, tuple(asdict(cost) for cost in costs), (clock,)), options.json
    )


if __name__ == "__main__":
    main()
