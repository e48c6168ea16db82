"""Sets the arena against every split of the same bytes, at a budget calibrated on the split."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from benchmarks.replay.cases import PUBLISHED_TOKENS_PER_S, RATIOS, Case, published_cases
from benchmarks.replay.loads import Load
from benchmarks.replay.rates import Rates
from benchmarks.replay.simulator import Outcome, Replay, Setting

MOST_TRIALS = 9
MOST_LAYER_S = 300e-6
HALVINGS = 7


@dataclass(frozen=True)
class Comparison:
    """One case: the named split, the arena, and the sweep by ratio, all in the same bytes."""

    case: Case
    arena_bytes: int
    calibrated: bool
    split: Outcome
    arena: Outcome
    sweep: dict[float, Outcome]

    @property
    def fit(self) -> dict[float, Outcome]:
        """The ratios at which no request was refused."""
        return {ratio: outcome for ratio, outcome in self.sweep.items() if not outcome.refused}

    def figures(self) -> dict[str, float]:
        """The published names, without the case's own."""
        rates = [outcome.tokens_per_s for outcome in self.fit.values()] or [float("nan")]
        split, arena = self.split, self.arena
        running = self.case.running
        return {
            "arena_gb": self.arena_bytes / 1e9,
            "running_split": getattr(split, running),
            "running_arena": getattr(arena, running),
            "running_ratio": getattr(arena, running) / getattr(split, running),
            "throughput_split": split.tokens_per_s,
            "throughput_arena": arena.tokens_per_s,
            "throughput_ratio": arena.tokens_per_s / split.tokens_per_s,
            "retractions_arena": arena.retractions,
            "retractions_split": split.retractions,
            "ttft_p50_arena": arena.ttft_p50_s,
            "ttft_p50_split": split.ttft_p50_s,
            "idle_arena": arena.idle_share,
            "idle_split": split.idle_share,
            **{f"waiting_{name}_arena": share for name, share in arena.waiting_shares.items()},
            **{f"waiting_{name}_split": share for name, share in split.waiting_shares.items()},
            "moves_arena": arena.moves,
            "vs_best_split": arena.tokens_per_s / max(rates),
            "vs_median_split": arena.tokens_per_s / statistics.median(rates),
            "ratios_refusing": len(self.sweep) - len(self.fit),
        }


def setting_of(case: Case, arena_bytes: int, mode: str, ratio: float) -> Setting:
    """The case in ``arena_bytes``, as arena or as a split."""
    return Setting(
        case.shape,
        arena_bytes,
        mode,
        ratio,
        case.grain,
        case.max_running,
        case.step_tokens,
        case.prefix_cache,
        rates=case.rates,
    )


def run_one(case: Case, arena_bytes: int, mode: str, ratio: float, load: Load | None = None) -> Outcome:
    """One replay, its trail thinned for keeping."""
    outcome = Replay(setting_of(case, arena_bytes, mode, ratio), load or case.make_load()).run()
    return replace(outcome, trail=outcome.trail.thinned(300))


def calibrate_overhead(rates: Rates) -> Rates:
    """``rates`` with the time per layer at which the split shows :data:`PUBLISHED_TOKENS_PER_S` in ample memory.

    The published figures of the other loads are taken to come from the engine that showed this one on the same card.
    What it read and computed is bounded by the card and measured; how long it lingered over a layer only its
    throughput tells.
    """
    ample = next(case for case in published_cases() if case.load_name == "1k_256")
    load = ample.make_load()
    low, high = 0.0, MOST_LAYER_S
    for _ in range(HALVINGS):
        layer_s = (low + high) / 2
        case = replace(ample, rates=replace(rates, layer_s=layer_s, row_s=0.0))
        shown = run_one(case, case.arena_bytes, "split", case.split_ratio, load).tokens_per_s
        low, high = (layer_s, high) if shown > PUBLISHED_TOKENS_PER_S else (low, layer_s)
    layer_s = (low + high) / 2
    said = f"calibrated: a split shows the published {PUBLISHED_TOKENS_PER_S:g} tokens/s in ample memory"
    sources = {**dict(rates.sources), "layer_s": said, "row_s": "in layer_s"}
    return replace(rates, layer_s=layer_s, row_s=0.0, sources=tuple(sources.items()))


def calibrate(case: Case) -> tuple[int, bool]:
    """The bytes at which the named split shows the published figure, and whether they were found.

    The search begins at the published bytes and walks away from them in steps of 4 %, below and above by turns, so
    the nearest budget that fits is taken.
    """
    if case.target is None:
        return case.arena_bytes, True
    load = case.make_load()
    for trial in range(MOST_TRIALS):
        away = (trial + 1) // 2 * (1 if trial % 2 else -1)
        arena_bytes = int(case.arena_bytes * (1 + 0.04 * away))
        if case.target.met_by(run_one(case, arena_bytes, "split", case.split_ratio, load)):
            return arena_bytes, True
    return case.arena_bytes, False


def compare(case: Case, arena_bytes: int, calibrated: bool, ratios: tuple[float, ...] = RATIOS) -> Comparison:
    """Runs the case as arena, as the named split and at every ratio."""
    load = case.make_load()
    sweep = {ratio: run_one(case, arena_bytes, "split", ratio, load) for ratio in ratios}
    named = sweep.get(case.split_ratio)
    return Comparison(
        case,
        arena_bytes,
        calibrated,
        named or run_one(case, arena_bytes, "split", case.split_ratio, load),
        run_one(case, arena_bytes, "arena", 0.5, load),
        sweep,
    )
