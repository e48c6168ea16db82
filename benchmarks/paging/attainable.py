"""What streams of one domain can gain by sharing experts under a routing: with perfect replacement, and by its law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.limits import LinkCurve, distinct_experts, in_layer_step_s
from benchmarks.paging.routing import Trace
from benchmarks.routing_traces import RoutingModel
from worker.experts.policies import Step, belady_hits

WARM_SHARE = 0.25
"""Of a trace's steps, in which the places are filled."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``size`` of a block; ``curve`` of the link; ``memory_rate`` bytes per second that hits are read at."""

    size: int
    curve: LinkCurve
    memory_rate: float


@dataclass(frozen=True, slots=True)
class Need:
    """Per step and layer, behind the warm steps: distinct experts, and those of them that Belady with bypass misses
    over one pool of places for all layers."""

    distinct: float
    misses: float


def need_of(trace: Trace, model: RoutingModel, places: int) -> Need:
    """What ``trace`` [steps, layers, streams, experts_per_token] asks of ``places`` a layer."""
    steps = _keys(trace, model.num_experts)
    warm = int(WARM_SHARE * len(steps))
    asked = [sum(len(keys) for keys in step) for step in steps]
    hits = belady_hits(steps, places * model.num_layers)
    layers = model.num_layers * (len(steps) - warm)
    return Need(sum(asked[warm:]) / layers, (sum(asked[warm:]) - sum(hits[warm:])) / layers)


def least_step_s(need: Need, num_layers: int, resident_s: float, machine: Machine) -> float:
    """The in-layer limit of a step that misses no more than Belady."""
    hit_s = (need.distinct - need.misses) * machine.size / machine.memory_rate
    return in_layer_step_s(resident_s, [(need.misses, hit_s)] * num_layers, machine.curve)


def sharing_note(one: Need, four: Need, apart: Need, model: RoutingModel) -> str:
    """How much the streams of a domain have in common under the generator's law, in words."""
    chance = distinct_experts(model.num_experts, model.per_token, 4)
    return (
        f"routing: of {4 * model.per_token} choices a layer, four streams of one domain take {four.distinct:.1f}"
        f" distinct experts and those of four domains {apart.distinct:.1f} (uniform and independent: {chance:.1f});"
        f" Belady with bypass misses {one.misses:.2f} a layer and step for one stream and"
        f" {four.misses / 4:.2f} a stream for four of one domain"
    )


def _keys(trace: Trace, num_experts: int) -> Sequence[Step]:
    return [
        [np.unique(chosen + layer * num_experts) for layer, chosen in enumerate(step)]
        for step in trace.reshape(*trace.shape[:2], -1)
    ]
