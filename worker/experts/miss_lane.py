"""Chooses how missing experts that get a place are brought: by the products as they read them, or ahead of them.

*tee*: one launch computes hits and misses; a program that reads a missing weight over the link also stores it.
*gather*: a launch copies the blocks into their places, then the products read everything there. Which is faster
depends on the machine, the format and the number of tokens, so both are measured at start. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from kernels.experts import Ahead, BlockFormat, run_experts
from kernels.pointwise import GatedActivation
from kernels.residency import gather

LANES = ("tee", "gather", "measured")
MEASURED_TOKENS = (1, 4, 16, 64)
MISSING = 5
"""One in so many of a step's distinct experts is missing when the lanes are measured; one of them gets a place, as most
do not in a set that has settled."""
REPEATS = 5


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the products of one layer are told; ``hidden`` H, ``inner`` I."""

    where: BlockFormat
    inner: int
    activation: GatedActivation
    hidden: int
    experts_per_token: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Median seconds of one layer with ``num_tokens`` tokens and ``num_missing`` missing experts, by lane."""

    num_tokens: int
    num_missing: int
    tee_s: float
    gather_s: float


@dataclass(frozen=True, slots=True)
class LaneChoice:
    """``times`` ascending in tokens; without any all numbers of tokens take ``default``."""

    times: tuple[LaneTimes, ...] = ()
    default: str = "tee"

    def gathers(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens gathers: as the next larger number that was measured, or the largest."""
        if not self.times:
            return self.default == "gather"
        near = next((entry for entry in self.times if entry.num_tokens >= num_tokens), self.times[-1])
        return near.gather_s < near.tee_s

    def line(self) -> str:
        """The choice in words."""
        if not self.times:
            return f"missing ones come by {self.default}"
        each = (
            f"{'gather' if self.gathers(entry.num_tokens) else 'tee'} at {entry.num_tokens}"
            f" ({entry.num_missing} missing: {1e6 * entry.tee_s:.0f} us by tee, {1e6 * entry.gather_s:.0f} by gather)"
            for entry in self.times
        )
        return f"missing ones come by {', '.join(each)} tokens"


def measure_lanes(layer: LayerShape, host: torch.Tensor, grid: torch.Tensor) -> LaneChoice:
    """Times both lanes for the experts whose blocks lie at ``host`` [experts] int64, over ``grid`` [places,
    place_bytes], whose content is overwritten; at least as many places as experts."""
    chance = torch.Generator(grid.device).manual_seed(0)
    return LaneChoice(tuple(_times(layer, host, grid, tokens, chance) for tokens in MEASURED_TOKENS))


def _times(
    layer: LayerShape, host: torch.Tensor, grid: torch.Tensor, tokens: int, chance: torch.Generator
) -> LaneTimes:
    device, num_experts = grid.device, len(host)
    scores = torch.rand(tokens, num_experts, device=device, generator=chance)
    experts = scores.topk(layer.experts_per_token, dim=-1).indices
    weights = torch.ones(tokens, layer.experts_per_token, device=device)
    x = torch.zeros(tokens, layer.hidden, dtype=layer.dtype, device=device)
    chosen = experts.unique()
    missing = chosen[: max(1, len(chosen) // MISSING)]
    places = grid.data_ptr() + torch.arange(num_experts, device=device) * grid.stride(0)
    table, targets = places.clone(), torch.zeros_like(places)
    table[missing], targets[missing[:1]] = host[missing], places[missing[:1]]
    reach = (grid.data_ptr(), grid.data_ptr() + len(grid) * grid.stride(0))
    # Not ``held``: pairs may only be grouped beside a decision, which waits for what the launches before it read.
    ahead = Ahead(torch.where(targets > 0, targets, table), *reach)

    def products(tee: torch.Tensor | None, brought: Ahead | None) -> None:
        run_experts(
            x, weights, experts, table, layer.where, layer.inner, layer.activation, tee, ahead=brought
        )

    def by_gather() -> None:
        gather(table, targets, layer.where.num_bytes)
        products(None, ahead)

    by_tee = _median_s(lambda: products(targets, None))
    return LaneTimes(tokens, len(missing), by_tee, _median_s(by_gather))


def _median_s(run: Callable[[], None]) -> float:
    times = []
    for attempt in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if attempt >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return median(times)
