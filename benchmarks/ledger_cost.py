"""Measures what the ledger costs the host: decode steps, a thousand planned moves, evictions from trees of two sizes.

    python -m benchmarks.ledger_cost [--json FILE]

One core, no device, no scheduler. The geometries are a sliding-window model (GPT-OSS-20B: 24,576 B a token in FULL and
in WINDOW(128) pages) and a recurrent one (Qwen3.5-35B-A3B: 20,480 B a token, 64.4 MB of state), experts in the gap.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from dataclasses import dataclass

from benchmarks.report import hardware, report_parser
from memory.api import Grant, LayerRows, PageAsk, PageKind, PageSpec, Row
from memory.ledger.ledger import ArenaLedger
from memory.ledger.prefix_tree import GroupRule, PrefixTree

ROWS = (64, 256, 1000)
NUM_STEPS = 200
PROMPT_TOKENS = 4096
PAGE_TOKENS = 64
GIB = 1 << 30


def _tokens(name: str, token_bytes: int, page_tokens: int, window: int | None = None) -> PageSpec:
    kind = PageKind.FULL if window is None else PageKind.WINDOW
    layers = (LayerRows(0, (Row("kv", (token_bytes,), "uint8"),)),)
    return PageSpec(name, kind, page_tokens, layers, window)


def _state(num_bytes: int) -> PageSpec:
    return PageSpec("state", PageKind.STATE, 1, (LayerRows(0, (Row("s", (num_bytes,), "uint8"),)),))


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's pages, and an arena that holds 1,000 requests of them."""

    name: str
    specs: tuple[PageSpec, ...]
    place_bytes: int
    arena_bytes: int


GEOMETRIES = (
    Geometry(
        "gpt-oss-20b",
        (_tokens("full", 24_576, PAGE_TOKENS), _tokens("window128", 24_576, PAGE_TOKENS, 128)),
        13_219_200,
        160 * GIB,
    ),
    Geometry(
        "qwen3.5-35b-a3b", (_tokens("full", 20_480, PAGE_TOKENS), _state(64_389_120)), 1_671_168, 220 * GIB
    ),
)


def step_ms(geometry: Geometry, num_rows: int) -> tuple[float, float]:
    """(mean, slowest tenth) milliseconds of begin, every row's capacity and grant, commit and end of a decode step,
    two steps in flight. Lengths differ, so that the rows' page grants are spread over the steps."""
    ledger = ArenaLedger(geometry.specs, geometry.arena_bytes, expert_place_bytes=geometry.place_bytes)
    lengths = {row: PROMPT_TOKENS - row % PAGE_TOKENS for row in range(num_rows)}
    for row, length in lengths.items():
        ledger.begin_step(row, row - 1)
        if not isinstance(ledger.grant(PageAsk(row, length, length - 1)), Grant):
            raise RuntimeError(f"{geometry.name}: the arena holds only {row} requests")
        ledger.commit_step(row)
    seconds = []
    for step in range(num_rows, num_rows + NUM_STEPS):
        start = time.process_time()
        ledger.begin_step(step, step - 2)
        for row, length in lengths.items():
            if ledger.capacity_tokens(row) <= length:
                ledger.grant(PageAsk(row, length + 1, length))
            lengths[row] = length + 1
        ledger.commit_step(step)
        ledger.end_step(step - 1)
        seconds.append(time.process_time() - start)
    return 1e3 * statistics.mean(seconds), 1e3 * sorted(seconds)[int(0.9 * NUM_STEPS)]


def plan_moves_ms(num_moves: int = 1000) -> float:
    """Milliseconds of a ``commit_step`` that plans ``num_moves`` copies of sealed pages into holes."""
    spec = _tokens("full", 1024, 1)
    found = []
    for _ in range(5):
        ledger = ArenaLedger(
            [spec],
            8 * num_moves * spec.page_bytes,
            expert_place_bytes=8192,
            move_budget_bytes=num_moves * 1024,
        )
        ledger.begin_step(1, 0)
        for request in range(4 * num_moves):
            ledger.grant(PageAsk(request, 1))
        ledger.commit_step(1)
        ledger.begin_step(2, 1)
        for request in range(4 * num_moves):
            if request % 2 and request < 3 * num_moves:
                ledger.release(request)
            else:
                ledger.grant(PageAsk(request, 1, 1))
        start = time.process_time()
        commands = ledger.commit_step(2)
        found.append(time.process_time() - start)
        if len(commands.moves) != num_moves or not all(move.sealed for move in commands.moves):
            raise RuntimeError(f"{len(commands.moves)} moves planned, not {num_moves}")
    return 1e3 * statistics.median(found)


def evict_us_per_page(num_leaves: int, num_evicted: int = 1000) -> float:
    """Microseconds per page evicted one at a time from a tree of ``num_leaves`` leaves, bookkeeping included."""
    spec = _tokens("full", 128, 16)
    tree = PrefixTree({"full": GroupRule(PageKind.FULL, 16, spec.page_bytes)})
    ledger = ArenaLedger([spec], (num_leaves + 1) * spec.page_bytes, prefix_tree=tree)
    ledger.begin_step(1, 0)
    for leaf in range(num_leaves):
        ledger.grant(PageAsk(leaf, 16))
        ledger.release(leaf, [leaf] * 16, 16)
    ledger.commit_step(1)
    ledger.end_step(1)
    start = time.process_time()
    for _ in range(num_evicted):
        ledger.shed({"full": spec.page_bytes})
    seconds = time.process_time() - start
    if len(tree) != num_leaves - num_evicted:
        raise RuntimeError(f"{num_leaves - len(tree)} leaves evicted, not {num_evicted}")
    return 1e6 * seconds / num_evicted


def measure() -> dict[str, float]:
    """Every figure."""
    figures: dict[str, float] = {}
    for rows in ROWS:
        costs = [step_ms(geometry, rows) for geometry in GEOMETRIES]
        figures[f"step_ms_{rows}"] = max(mean for mean, _ in costs)
        figures[f"step_ms_{rows}_p90"] = max(slow for _, slow in costs)
    figures["plan_1000_moves_ms"] = plan_moves_ms()
    figures["evict_us_per_page_1k"] = statistics.median(evict_us_per_page(1_000, 500) for _ in range(5))
    figures["evict_us_per_page_100k"] = statistics.median(evict_us_per_page(100_000) for _ in range(3))
    figures["evict_ratio"] = figures["evict_us_per_page_100k"] / figures["evict_us_per_page_1k"]
    return {name: round(value, 4) for name, value in figures.items()}


def conditions() -> dict[str, str]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "hardware": f"{hardware()}, of which one is used",
        "clock": "processor time of this process, which waits for nothing: wall time on a core of its own",
        "geometries": ", ".join(geometry.name for geometry in GEOMETRIES) + " (the slower of the two counts)",
        "steps": f"{NUM_STEPS} decode steps from {PROMPT_TOKENS} tokens a row, pages of {PAGE_TOKENS}, two in flight",
    }


def main() -> None:
    """Prints the table."""
    options = report_parser(__doc__).parse_args()
    figures = measure()
    for name, value in figures.items():
        print(f"{name:28s} {value:10.4f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"conditions": conditions(), "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
