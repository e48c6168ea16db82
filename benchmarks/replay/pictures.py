"""Draws the bands of the arena over time: what each kind uses, keeps for later and leaves empty."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from benchmarks.replay.simulator import Outcome
from benchmarks.replay.sweep import Comparison

COLOURS = {"state": "#7b3294", "window": "#008837", "full": "#2166ac"}
GAP = {False: ("#eeeeee", "gap"), True: ("#f4a582", "expert places")}
USES = ("used", "kept prefixes", "empty")
STRENGTH = (1.0, 0.55, 0.2)
COLOURS_IN_FILE = 48


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """One row per case: the named split on the left, the arena on the right."""
    figure, axes = plt.subplots(
        len(comparisons), 2, figsize=(9, 1.75 * len(comparisons) + 0.5), squeeze=False, layout="constrained"
    )
    for row, comparison in zip(axes, comparisons, strict=True):
        for axis, outcome, what in zip(
            row,
            (comparison.split, comparison.arena),
            (f"split {comparison.case.split_ratio:.3g}", "arena"),
            strict=True,
        ):
            _bands(axis, outcome)
            axis.set_title(
                f"{comparison.case.name}: {what}, {outcome.tokens_per_s:,.0f} tokens/s", fontsize=7
            )
    handles, labels = axes[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=6, ncols=8, loc="outside lower center")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=70)
    plt.close(figure)
    # Few colours are used: a palette makes the file a third as large.
    Image.open(buffer).convert("RGB").quantize(COLOURS_IN_FILE).save(path, optimize=True)


def _bands(axis: Axes, outcome: Outcome) -> None:
    trail = outcome.trail
    time_s = np.array(trail.time_s)
    names = sorted(
        trail.kinds[0], key=lambda name: ("state", "window", "full").index(name.rstrip("0123456789"))
    )
    layers: list[np.ndarray] = []
    colours: list[str | tuple[float, float, float, float]] = []
    labels: list[str] = []
    for name in [*names[:-1], None, names[-1]]:
        if name is None:
            colour, label = GAP[outcome.setting.shape.paged]
            held = np.array([sum(map(sum, kinds.values())) for kinds in trail.kinds])
            layers.append((outcome.setting.arena_bytes - held) / 1e9)
            colours.append(colour)
            labels.append(label)
            continue
        # From low to high addresses; FULL grows down from the high end, so its empty pages lie lowest.
        order = (2, 1, 0) if name == names[-1] else (0, 1, 2)
        for part in order:
            layers.append(np.array([kinds[name][part] for kinds in trail.kinds]) / 1e9)
            colours.append((*matplotlib.colors.to_rgb(COLOURS[name.rstrip("0123456789")]), STRENGTH[part]))
            labels.append(f"{name} {USES[part]}")
    axis.stackplot(time_s, *layers, colors=colours, labels=labels, linewidth=0)
    axis.set_xlim(time_s[0], time_s[-1])
    axis.set_ylim(0, outcome.setting.arena_bytes / 1e9)
    axis.tick_params(labelsize=6)
    axis.set_ylabel("GB", fontsize=6)
    axis.set_xlabel("s", fontsize=6)
    running = axis.twinx()
    running.plot(time_s, trail.running, color="black", linewidth=0.6)
    running.set_ylim(0, None)
    running.tick_params(labelsize=6)
