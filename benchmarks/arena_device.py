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
- ``arena.throughput_ratio``: 64 requests at once, one arena over fixed shares, ample memory;
- ``compact_*.stall_ms``: 2 GB of pages move while 64 requests decode: how much longer than the median step the slowest
  step behind it is. ``background`` keeps to the budget of a step, ``beside`` and ``between`` do it in one step, on a
  stream beside it or ahead of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.arena.chats import LONGEST_CHARS, SHORTEST_CHARS, computed_share, draw_turns, run_chats
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from demo.packing import restore
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

log = logging.getLogger(__name__)

DEMO = Path("demo/model")
MAX_ANSWER_TOKENS = 256
ARENA_BYTES = 36 << 30


def measure_chats(count: int) -> tuple[dict[str, Value], Conditions]:
    """Chats on the CPU, one at a time."""
    engine = NativeEngine(WorkerConfig(str(restore(DEMO)), device="cpu", arena_bytes=1 << 29, num_threads=1))
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


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the shared prefix and of what the host tier keeps, requests at once, tokens of prompt and output of the
    comparison, bytes moved, tokens of the prompts whose pages move, and repeats."""

    prefix: int = 4096
    host: int = 8192
    at_once: int = 64
    tokens: tuple[int, int] = (64, 256)
    moved_bytes: int = 2 << 30
    moved_prompt: int = 4096
    repeats: int = 3


def measure_device(
    config: WorkerConfig, sizes: Sizes, parts: set[str], written: Callable[[Mapping[str, Value]], None]
) -> None:
    """Everything that needs a GPU. A part that fails is said and left out; ``written`` is told of all figures so far
    behind each part."""
    from benchmarks.arena import loads

    row: dict[str, Value] = {}

    def take(part: str, measure: Callable[[], Mapping[str, Value]]) -> None:
        started_s = time.perf_counter()
        try:
            row.update(measure())
        except Exception:
            log.exception("%s failed", part)
            row[f"{part}.failed"] = True
        print(f"{part}: {time.perf_counter() - started_s:.1f} s", flush=True)
        written(row)

    started_s = time.perf_counter()
    bench = loads.Bench.open(config)
    print(f"started in {time.perf_counter() - started_s:.1f} s", flush=True)
    if "prefix" in parts:
        take("prefix", lambda: loads.share_prefix(bench, sizes.prefix, sizes.repeats))
    if "host" in parts:
        take("host", lambda: loads.restore_from_host(bench, sizes.host, sizes.repeats))
        take("beside", lambda: loads.restore_beside_others(bench, sizes.at_once, sizes.host))
    if "compact" in parts:
        budget = bench.ledger._book.relocator.move_budget_bytes
        for name, step_bytes, sealed in (
            ("compact_background", min(budget, sizes.moved_bytes), True),
            ("compact_beside", sizes.moved_bytes, True),
            ("compact_between", sizes.moved_bytes, False),
        ):
            plan = loads.CompactionPlan(sizes.moved_bytes, step_bytes, sealed)
            load = partial(loads.compact_under_load, bench, sizes.at_once, sizes.moved_prompt, plan, name)
            take(name, load)
    if "modes" in parts:
        size = (sizes.at_once, *sizes.tokens)
        bench.engine.flush_prefix_cache()
        take("arena", lambda: loads.throughput(bench, size, sizes.repeats, "arena"))
        bench = loads.Bench.open(replace(config, memory_mode="split"), bench.hand_over())
        take("split", lambda: loads.throughput(bench, size, sizes.repeats, "split"))
        ours, theirs = row.get("arena.tokens_per_s"), row.get("split.tokens_per_s")
        if isinstance(ours, float) and isinstance(theirs, float):
            row["arena.throughput_ratio"] = ours / theirs
            written(row)
    bench.close()


def _device_conditions(sizes: Sizes) -> Conditions:
    from benchmarks.arena import loads

    prompt, output = sizes.tokens
    return Conditions(
        model="Qwen3.5-4B shape",
        weights="random, bf16",
        prompts="random ids; pages that move: claimed, not computed",
        cache="prefix and host tier (4 GiB): cold, then warm; arena against split: cold",
        batch=f"prefix and host tier 1; others {sizes.at_once}",
        context=f"shared {sizes.prefix} + {loads.TAIL_TOKENS}, host tier {sizes.host} + {loads.TAIL_TOKENS},"
        f" arena against split {prompt} + {output} tokens",
        resident="dense",
    )


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--parts", default="prefix,host,modes,compact", help="of what is measured on a GPU")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.device == "cpu":
        row, conditions = measure_chats(options.chats)
        publish(Report("arena_device", conditions, (row,)), options.json)
        return
    from benchmarks.shapes import shape_folder

    sizes = Sizes()
    config = WorkerConfig(
        str(shape_folder("qwen3.5-4b", "bf16")),
        device=options.device,
        load="random",
        arena_bytes=ARENA_BYTES,
        max_running=sizes.at_once,
        max_model_len=12288,
        host_tier_bytes=4 << 30,
    )
    measure_device(
        config,
        sizes,
        set(options.parts.split(",")),
        lambda row: publish(Report("arena_device", _device_conditions(sizes), (row,)), options.json),
    )


if __name__ == "__main__":
    main()
