"""Scores the shipped checkpoint with stock transformers and writes the figures.

    python -m demo.evaluate --data DATA --json benchmarks/results/demo_evaluate.json --routing demo/routing

DATA holds books_valid.txt.xz. --routing also records the choice of experts for the same held-out texts.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from benchmarks.report import hardware
from demo import corpus, expert_routing, scoring
from demo.reference import load_reference

CAPACITIES = (8, 16, 24)


def routing_figures(what: expert_routing.Record) -> dict[str, float]:
    """Loads of the experts, reuse between neighbouring tokens, and hit rates of a cache per layer."""
    shares = expert_routing.loads(what)
    out = {"load_min": float(shares.min()), "load_max": float(shares.max())}
    for name, chats in (("documents", False), ("chats", True)):
        out[f"reuse_{name}"] = expert_routing.reuse(what, chats)
        for capacity in CAPACITIES:
            out[f"lru_{capacity}_{name}"] = expert_routing.lru_hit_rate(what, chats, capacity)
    return out


def figures(scored: scoring.Scored, data: Path, routing: Path | None, every: int) -> dict[str, float]:
    """All figures of one run, each printed when it is there."""
    out: dict[str, float] = {}

    def note(names: tuple[str, ...], measure: Callable[[], tuple[float, ...]]) -> None:
        start = time.monotonic()
        values = measure()
        for name, value in zip(names, values, strict=True):
            out[name] = round(value, 4)
            print(f"{name} {value:.4f} ({time.monotonic() - start:.0f} s)", flush=True)

    sources = corpus.Sources("\n".join(corpus.books(data, "books_valid")), [], [])
    note(("bzip2_bits_per_byte",), lambda: (scoring.bzip2_bits_per_byte(data, "books_valid"),))
    note(("copy_in_window",), lambda: (scoring.copies(scored, 200, 21),))
    note(("two_digit_sums",), lambda: (scoring.sums(scored, 200, False, 22),))
    note(("two_digit_sums_thinking",), lambda: (scoring.sums(scored, 50, True, 23),))
    note(("tool_calls_valid", "tool_calls_right"), lambda: scoring.tool_calls(scored, 150, 24))
    note(("json_valid", "json_right"), lambda: scoring.json_answers(scored, 150, 25))
    note(("headroom_facts",), lambda: (scoring.facts(scored),))
    note(("retrieval_1000",), lambda: (scoring.retrieved(scored, sources, 60, 1000, 30, 26),))
    note(("retrieval_3000",), lambda: (scoring.retrieved(scored, sources, 16, 3000, 30, 27),))
    texts = list(scoring.held_out_texts(scored, data, 200, 48, 200))
    record = expert_routing.record(scored.model, [ids for ids, _ in texts], [chat for _, chat in texts])
    if routing is not None:
        expert_routing.save(record, routing)
    shares = routing_figures(record)
    note(tuple(shares), lambda: tuple(shares.values()))
    note(("mtp_agreement", "mtp_agreement_books"), lambda: scoring.mtp_agreement(scored, texts))
    note(("bits_per_byte", "tokens_scored"), lambda: scoring.bits_per_byte(scored, data, 2048, every))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--routing", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=4, help="score every n-th window of the held-out books")
    args = parser.parse_args()
    model = load_reference(args.model, torch.float32).to(args.device)
    # Grouped products exist for bf16 alone on some devices; the plain loop over experts is the reference everywhere.
    model.set_experts_implementation("eager")
    scored = scoring.Scored(model, AutoTokenizer.from_pretrained(str(args.model)))
    found = figures(scored, args.data, args.routing, args.every)
    conditions = {
        "model": "demo/model",
        "weights": "trained, bf16 file computed in fp32",
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "prompts": "held out: books_valid, and generated dialogues whose keys were never trained on",
        "decoding": "greedy; replies in batches padded on the left",
        "batch": "4 to 50",
        "context": "20 to 3,500 tokens; books in windows of 2,048",
        "books": f"every {args.every}th window of each held-out book, read from an empty state",
        "hardware": hardware(),
        "python": platform.python_version(),
    }
    report = {"benchmark": "demo_evaluate", "conditions": conditions, "figures": found}
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
