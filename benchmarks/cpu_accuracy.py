"""Compares the native engine on a CPU with stock transformers: greedy tokens and log-probabilities, float32.

    python -m benchmarks.cpu_accuracy [--model FOLDER] [--prompts 50] [--json FILE]

Every prompt is answered alone, then 16 at once in random order of arrival, with budgets per step that cut prompts
into chunks of varying size. ``greedy_mismatches`` counts tokens other than the reference's where its two best lie at
least 1e-4 apart; ``resynchronised_share`` is the share of other positions where the choice differed. Positions behind a
router's tie (its last chosen expert and the next one equal within float32's error) are compared apart: there two right
computations may take different experts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu_engine import Answer, run_prompts
from benchmarks.cpu_reference import ROOT, Agreement, compare, sample_prompts
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from demo.packing import restore
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

SHORTEST, LONGEST = 20, 1500
AT_ONCE = 16
STEP_TOKENS = (23, 61, 128, 333, 1024)
"""Budgets per step of the runs with many rows; what decode rows leave of them is the chunk."""


def draw_lengths(count: int, rng: random.Random) -> list[int]:
    """Both ends, then lengths spread evenly over orders of magnitude."""
    drawn = [round(SHORTEST * (LONGEST / SHORTEST) ** rng.random()) for _ in range(max(count - 2, 0))]
    return [SHORTEST, LONGEST, *drawn][:count]


def open_engine(folder: Path, max_step_tokens: int) -> NativeEngine:
    """An engine in float32 on the CPU, without prefix cache: every token is computed."""
    return NativeEngine(
        WorkerConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            max_running=AT_ONCE,
            max_step_tokens=max_step_tokens,
            prefix_cache=False,
        )
    )


def judge(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> Agreement:
    """All answers against the reference."""
    found = Agreement()
    for prompt, answer in zip(prompts, answers, strict=True):
        found = found.joined(compare(folder, prompt, answer.token_ids, answer.logprobs))
    return found


def answer_alone(folder: Path, prompts: Sequence[Sequence[int]], num_new: int) -> list[Answer]:
    """One request at a time."""
    engine = open_engine(folder, 2048)
    try:
        return [run_prompts(engine, [prompt], num_new, logprobs=5)[0] for prompt in prompts]
    finally:
        engine.close()


def answer_together(
    folder: Path, prompts: Sequence[Sequence[int]], num_new: int, rng: random.Random
) -> list[Answer]:
    """16 at once, arriving in random order at random moments."""
    order = list(range(len(prompts)))
    rng.shuffle(order)
    answers: dict[int, Answer] = {}
    for first in range(0, len(order), AT_ONCE):
        chosen = order[first : first + AT_ONCE]
        engine = open_engine(folder, STEP_TOKENS[first // AT_ONCE % len(STEP_TOKENS)])
        try:
            gaps_s = [rng.random() * 0.02 for _ in chosen]
            found = run_prompts(engine, [prompts[i] for i in chosen], num_new, logprobs=5, gaps_s=gaps_s)
        finally:
            engine.close()
        answers.update(zip(chosen, found, strict=True))
    return [answers[i] for i in range(len(prompts))]


def as_row(name: str, found: Agreement) -> dict[str, Value]:
    """A line of the report."""
    return {
        "run": name,
        "positions": found.positions,
        "greedy_mismatches": found.mismatches,
        "resynchronised_share": found.resynchronised / max(found.positions, 1),
        "max_logprob_diff": found.max_logprob_diff,
        "behind_router_tie": found.behind_router_tie,
        "tied_logprob_diff": found.tied_logprob_diff,
    }


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    restore(options.model)
    rng = random.Random(options.seed)
    prompts = sample_prompts(options.model, draw_lengths(options.prompts, rng), options.seed)
    alone = judge(options.model, prompts, answer_alone(options.model, prompts, options.new_tokens))
    together = answer_together(options.model, prompts, options.new_tokens, rng)
    mixed = judge(options.model, prompts, together)
    conditions = Conditions(
        model="/".join(options.model.parts[-2:]),
        weights="as in the folder, computed in float32",
        prompts=f"{len(prompts)} pieces of the repository's licence, seed {options.seed}",
        cache="cold",
        batch=f"1, and {AT_ONCE} at once",
        context=f"{SHORTEST}-{LONGEST} tokens + {options.new_tokens} new ones",
        resident="all",
    )
    rows = (as_row("alone", alone), as_row("together", mixed), as_row("all", alone.joined(mixed)))
    publish(Report("cpu_accuracy", conditions, rows), options.json)


if __name__ == "__main__":
    main()
