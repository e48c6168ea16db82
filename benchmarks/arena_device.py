"""Measures what the arena saves and costs in an engine: prefixes, host tier, compactions, arena against fixed shares.

    python -m benchmarks.arena_device --json benchmarks/results/arena_device.json
    python -m benchmarks.arena_device --device cuda --json benchmarks/results/h200/arena_device.json

On a CPU: ``prefix.second_turn_computed_share``, tokens computed over tokens new in the second turn of 50 chats with the
demo model's own template and its ``<think>`` answers; once with the reasoning handed back, as the template writes it,
and once without, as clients do that drop it. On a GPU, the Qwen3.5-4B shape with random weights:

- ``prefix.ttft_ratio``: time to first token of a prompt of 4,096 tokens, over that of another one that begins alike;
- ``host.restore_ratio``: the same for 8,192 tokens, over that when the arena has lost its pages and the host tier has
  them; every page that comes back is compared by hash, tokens and log-probabilities bit for bit;
- ``host.beside_*_ms``: the step that such a prompt joins while 63 others decode, and one that a new short prompt joins;
- ``arena.throughput_ratio``: 64 requests at once, one arena over fixed shares, in turns, ample memory;
- ``compact_*.stall_ms``: 2 GB of pages move while 64 requests decode: how much longer than the median step the slowest
  step behind it is. ``background`` keeps to the budget of a step, ``beside`` and ``between`` do it in one step, on a
  stream beside it or ahead of it.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.arena.chats import LONGEST_CHARS, SHORTEST_CHARS, computed_share, draw_turns, run_chats
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

if TYPE_CHECKING:
    from benchmarks.arena import loads

log = logging.getLogger(__name__)

DEMO = Path("demo/model")
MAX_ANSWER_TOKENS = 256
AT_ONCE = 64
ARENA_BYTES = 36 << 30
COMPACTED_BYTES = 2 << 30
MODE_TOKENS = (128, 512)
"""Of prompt and output, arena against fixed shares."""


def measure_chats(count: int) -> tuple[dict[str, Value], Conditions]:
    """Chats on the CPU, one at a time."""
    engine = NativeEngine(WorkerConfig(str(DEMO), device="cpu", arena_bytes=1 << 29, num_threads=1))
    try:
        chats = run_chats(DEMO, engine, draw_turns(count, 0), MAX_ANSWER_TOKENS)
    finally:
        engine.close()
    given, without = [chat.as_given for chat in chats], [chat.without for chat in chats]
    row: dict[str, Value] = {
        "prefix.second_turn_computed_share": computed_share(given),
        "prefix.second_turn_computed_share_without_reasoning": computed_share(without),
        "prefix.second_turn_computed_again": sum(t.num_computed - t.num_new for t in given) / count,
        "prefix.second_turn_new": sum(t.num_new for t in given) / count,
        "prefix.chats": count,
        "prefix.chats_with_reasoning": sum(chat.num_reasoning_chars > 0 for chat in chats),
    }
    conditions = Conditions(
        model="demo/model",
        weights="trained, computed in float32",
        prompts=f"pieces of the repository's licence ({SHORTEST_CHARS}-{LONGEST_CHARS} characters) with a"
        " hidden fact and a question about it, seed 0",
        cache="warm from the first turn",
        batch="1",
        context=f"turns of {sum(c.num_first_prompt for c in chats) / count:.0f} tokens on average, answers of"
        f" {sum(c.num_answer for c in chats) / count:.0f}",
        resident="all",
    )
    return row, conditions


def measure_device(options: Namespace) -> tuple[dict[str, Value], Conditions]:
    """Everything that needs a GPU; a part that fails is said and left out, the others go on."""
    from benchmarks.arena import loads
    from benchmarks.shapes import shape_folder

    config = WorkerConfig(
        str(shape_folder("qwen3.5-4b", "bf16")),
        device=options.device,
        load="random",
        arena_bytes=ARENA_BYTES,
        max_running=AT_ONCE,
        max_model_len=16384,
        host_tier_bytes=4 << 30,
    )
    row: dict[str, Value] = {}
    parts = set(options.parts.split(","))
    if parts & {"prefix", "host"}:
        bench = loads.Bench.open(config)
        if "prefix" in parts:
            _take(row, "prefix", lambda: loads.share_prefix(bench, 4096, 5))
        if "host" in parts:
            _take(row, "host", lambda: loads.restore_from_host(bench, 8192, 3))
            _take(row, "beside", lambda: loads.restore_beside_others(bench, AT_ONCE, 8192))
        bench.close()
    if parts & {"modes", "compact"}:
        plain = replace(config, host_tier_bytes=0)
        arena = loads.Bench.open(plain)
        if "modes" in parts:
            split = loads.Bench.open(replace(plain, memory_mode="split"))
            _take(row, "modes", lambda: loads.compare_modes(arena, split, (AT_ONCE, *MODE_TOKENS), 5))
            split.close()
        if "compact" in parts:
            _measure_compactions(row, arena)
        arena.close()
    conditions = Conditions(
        model="Qwen3.5-4B shape",
        weights="random, bf16",
        prompts="random ids",
        cache="prefix: cold, then warm; host tier of 4 GiB; arena against split: cold",
        batch=f"prefix and host tier 1; others {AT_ONCE}",
        context="4096, 8192, 128 + 512 and 64 + 120 tokens",
        resident="dense",
    )
    return row, conditions


def _measure_compactions(row: dict[str, Value], arena: loads.Bench) -> None:
    from benchmarks.arena import loads

    budget = arena.ledger._book.relocator.move_budget_bytes
    for name, step_bytes, sealed in (
        ("compact_background", budget, True),
        ("compact_beside", COMPACTED_BYTES, True),
        ("compact_between", COMPACTED_BYTES, False),
    ):
        plan = loads.CompactionPlan(COMPACTED_BYTES, step_bytes, sealed)
        _take(row, name, partial(loads.compact_under_load, arena, AT_ONCE, 4096, plan, name))


def _take(row: dict[str, Value], part: str, measure: Callable[[], Mapping[str, Value]]) -> None:
    started_s = time.perf_counter()
    try:
        row.update(measure())
    except Exception:
        log.exception("%s failed", part)
        row[f"{part}.failed"] = True
    print(f"{part}: {time.perf_counter() - started_s:.1f} s", flush=True)


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--parts", default="prefix,host,modes,compact", help="of what is measured on a GPU")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    row, conditions = measure_chats(options.chats) if options.device == "cpu" else measure_device(options)
    publish(Report("arena_device", conditions, (row,)), options.json)


if __name__ == "__main__":
    main()
