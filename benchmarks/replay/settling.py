"""Does everything come back: expert places after a burst of prompts, throughput after a storm of retractions."""

from __future__ import annotations

import numpy as np

from benchmarks.replay.loads import with_burst, with_storm
from benchmarks.replay.rates import ASSUMED, Rates
from benchmarks.replay.shapes import QWEN3_30B_A3B, QWEN35_4B
from benchmarks.replay.simulator import Replay, Setting

GRAIN = 8
SETTLE_S = 30.0


def places_after_burst(
    num_quiet: int = 400, num_burst: int = 24, grain: int = GRAIN, rates: Rates = ASSUMED
) -> dict[str, float]:
    """Expert places 30 simulated seconds after a burst was worked off (no more requests run than before it), against
    the mean before it."""
    load = with_burst(num_burst, num_quiet, 1.0, grain)
    setting = Setting(QWEN3_30B_A3B, 30_000_000_000, grain=grain, max_running=256, rates=rates)
    replay = Replay(setting, load)
    trail = replay.run().trail
    burst = [str(number) for number, job in enumerate(load.jobs) if len(job.prompt) * grain == 8192]
    began = replay.submitted[burst[0]]
    time_s, places, running = np.array(trail.time_s), np.array(trail.places), np.array(trail.running)
    quiet = (time_s > began - 30) & (time_s < began)
    before = float(places[quiet].mean())
    finished = max(replay.finished[name] for name in burst)
    ended = float(time_s[(time_s >= finished) & (running <= running[quiet].max())][0])
    least = float(places[(time_s >= began) & (time_s <= ended)].min())
    later = places[time_s >= ended + SETTLE_S]
    if not len(later):
        raise RuntimeError("the load ended before the places could settle")
    return {
        "burst.places_before": before,
        "burst.places_least": least,
        "burst.seconds": ended - began,
        "burst.places_share_at_its_end": float(places[time_s >= ended][0]) / before,
        "burst.places_share_after_30s": float(later[0]) / before,
    }


def throughput_after_storm(
    num_before: int = 700,
    num_storm: int = 96,
    num_after: int = 1800,
    grain: int = GRAIN,
    rates: Rates = ASSUMED,
) -> dict[str, float]:
    """Tokens a second of short requests after a retraction storm, against the same before it."""
    load = with_storm(num_before, num_storm, num_after, 96, grain)
    setting = Setting(QWEN35_4B, 10_000_000_000, grain=grain, max_running=128, rates=rates)
    replay = Replay(setting, load)
    outcome = replay.run()
    trail = outcome.trail
    time_s, tokens = np.array(trail.time_s), np.array(trail.tokens) * grain
    # Before: when the clients have had time to fall out of step, until the first request of the storm comes.
    before = (replay.finished[str(num_before // 2)], replay.submitted[str(num_before)])
    storm_ended = max(replay.finished[str(num_before + number)] for number in range(num_storm))
    after = (storm_ended, replay.submitted[str(num_before + num_storm + num_after - 1)])
    if after[1] - after[0] < 0.5 * (before[1] - before[0]):
        raise RuntimeError("the load ended before throughput could settle")

    def rate(span: tuple[float, float]) -> float:
        return float(tokens[(time_s > span[0]) & (time_s <= span[1])].sum() / (span[1] - span[0]))

    return {
        "storm.retractions": outcome.retractions * outcome.num_jobs / 1000,
        "storm.tokens_per_s_before": rate(before),
        "storm.tokens_per_s_after": rate(after),
        "storm.throughput_share_after": rate(after) / rate(before),
    }


def measure(rates: Rates = ASSUMED) -> dict[str, float]:
    """Both."""
    return places_after_burst(rates=rates) | throughput_after_storm(rates=rates)
