"""Decodes for a long time under churn on a GPU, and says whether memory stays flat and the books stay right.

    python -m benchmarks.decode_soak --steps 50000 [--json FILE]

The demo model, bfloat16: requests of all lengths come, some share prompts, some are aborted. Figures compare the second
half with its own start: ``reserved_growth`` of torch's reserved bytes, ``rss_growth`` of the process's memory; the
arena's ledger is audited at the end, and a failed audit ends the run with an error.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import torch

from benchmarks.report import Conditions, Report, Value, publish, report_parser
from demo.packing import restore
from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

MODEL = "demo/model"
SAMPLE_EVERY_S = 0.25
SAMPLES_PER_LINE = 20
ABORTED = 0.1
SHARED = 0.3


def resident_bytes() -> int:
    """Memory of this process that is resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def _one(engine: NativeEngine, name: str, chance: random.Random, shared: list[int]) -> None:
    length = chance.choice((1, 20, 100, 300, 700))
    own = [chance.randrange(20, 3800) for _ in range(length)]
    prompt = [*shared, *own] if chance.random() < SHARED else own
    num_new = chance.choice((16, 64, 200, 500))
    sampling = SamplingParams(max_tokens=num_new, temperature=chance.choice((0.0, 0.8)), ignore_eos=True)
    engine.submit(GenerateRequest(name, tuple(prompt), sampling))
    stop_after = chance.randrange(1, num_new) if chance.random() < ABORTED else num_new + 1
    seen = 0
    async for event in engine.stream(name):
        if event.error:
            raise RuntimeError(event.error)
        seen += len(event.token_ids)
        if seen >= stop_after:
            engine.abort(name)
            stop_after = num_new + 1
        await asyncio.sleep(0.02)


async def _run(
    engine: NativeEngine, num_steps: int, concurrency: int, most_s: float
) -> list[tuple[int, int, int]]:
    """(steps, reserved bytes, resident bytes) over time, until so many steps were done or so many seconds passed."""
    ends_s = time.perf_counter() + most_s
    chance = random.Random(0)
    shared = [chance.randrange(20, 3800) for _ in range(256)]
    samples: list[tuple[int, int, int]] = []
    count = 0

    def goes_on() -> bool:
        return engine.snapshot().num_steps < num_steps and time.perf_counter() < ends_s

    async def client() -> None:
        nonlocal count
        while goes_on():
            count += 1
            await _one(engine, f"r{count}", chance, shared)

    async def watch() -> None:
        while goes_on():
            samples.append((engine.snapshot().num_steps, torch.cuda.memory_reserved(), resident_bytes()))
            if len(samples) % SAMPLES_PER_LINE == 0:
                print("steps, reserved and resident bytes:", *samples[-1], flush=True)
            await asyncio.sleep(SAMPLE_EVERY_S)

    await asyncio.gather(watch(), *(client() for _ in range(concurrency)))
    return samples


def growth(values: list[int]) -> float:
    """How far the largest is above the first."""
    return max(values) / values[0] - 1.0


def main() -> None:
    """Runs and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument(
        "--seconds", type=float, default=85.0, help="at most; the table says how many steps they held"
    )
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--arena-bytes", type=int, default=1 << 28)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    config = WorkerConfig(
        model=str(restore(MODEL)),
        device=options.device,
        dtype="bfloat16",
        max_running=options.concurrency,
        arena_bytes=options.arena_bytes,
    )
    began_s = time.perf_counter()
    engine = NativeEngine(config)
    started_s = time.perf_counter()
    print(f"started in {started_s - began_s:.1f} s", flush=True)
    try:
        samples = asyncio.run(_run(engine, options.steps, options.concurrency, options.seconds))
        seconds = time.perf_counter() - started_s
        snapshot = engine.snapshot()
        time.sleep(2.5)  # an idle engine audits its ledger; a failed audit kills it
        engine.check_health()
    finally:
        engine.close()
    half = [entry for entry in samples if entry[0] >= snapshot.num_steps // 2]
    row: dict[str, Value] = {
        "steps": snapshot.num_steps,
        "seconds": seconds,
        "step_ms": 1e3 * seconds / max(1, snapshot.num_steps),
        "finished": snapshot.num_finished,
        "aborted": snapshot.num_aborted,
        "retractions": snapshot.num_retractions,
        "eager_decode_steps": snapshot.extra.get("graph.eager_decode_steps", 0.0),
        "reserved_growth": growth([entry[1] for entry in half]) if half[0][1] else 0.0,
        "rss_growth": growth([entry[2] for entry in half]),
    }
    conditions = Conditions(
        model="demo",
        weights="trained",
        prompts="random ids, three in ten behind a shared prefix",
        cache="prefix cache on",
        batch=f"closed loop of {options.concurrency}, one in ten aborted",
        context="1 to 1,456",
        resident="all",
    )
    publish(Report("decode_soak", conditions, (row,)), options.json)


if __name__ == "__main__":
    main()
