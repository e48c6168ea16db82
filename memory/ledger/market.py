"""Whether the next bytes serve better as expert places or as kept prefixes: prices in, a decision out.

Both sides carry one price: milliseconds saved per byte and second. For each side two estimates are made from running
totals, and the higher one holds. What was lost lately and missed again (ghosts) shows what the side's next bytes
would save; the average over what is held or missing stands in while ghosts are few.

Running requests are not bought out, but whether one more should start is asked at the same price. Each of b running
requests brings a share ``1 / b`` of what decode steps bring. One more, of B bytes, slows all by ``price x B`` seconds a
second, for the experts that have no place because of it, and by a share ``e / b`` of the time that decode steps wait
for the link, for experts that only it wants: ``e`` is the elasticity of distinct experts ``E (1 - (1 - k/E)^b)`` in b.
Time spent on prompts gets no shorter. So one more pays as long as all bytes that pages keep from experts, at the
experts' price, cost less than ``1 - share of prompts - e x share of decode misses`` seconds a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import log

COLDEST_SHARE = 0.25
"""What the coldest kept prefixes are taken to save, as a share of the average byte's. It only matters while nothing
has been evicted; evicting what was worth more shows in the ghosts."""


HOTTER = 1.5
"""How much more often the coldest expert that has a place is taken to be used than the average one without: 1.2 to 2
where use falls as the 0.7th power of an expert's rank. Ghosts, where they are counted, show it."""


FREE_SHARE = 1 / 16
"""While more of the places are free than this, as after the start or a burst, misses do not ask for more."""


URGENT_PACE = 8.0
"""Prefixes go up to so many times as fast while experts wait for them badly."""
URGENT_GAIN_MS = 250.0
"""Milliseconds a second that all kept prefixes' bytes would save as places: from here on the pace is the highest. A
lull in which little is missed does not cost the prefixes; chats behind a burst do not run with half their experts."""


class Tilt(Enum):
    """Which way bytes flow between prefixes and expert places."""

    HOLD = "hold"
    TO_EXPERTS = "to_experts"
    TO_PREFIXES = "to_prefixes"


@dataclass(frozen=True, slots=True)
class ExpertReading:
    """Running totals of the expert side, from the device's counters, and its size now.

    Attributes:
        misses: expert reads over the link so far.
        staged: those of them streamed for prompts, in staged passes.
        ghost_hits: those of decode steps whose expert had lately lost its place.
        num_ghosts: experts remembered as having lost theirs.
        num_places: usable places.
        num_free: those of them that nobody has taken yet.
        num_experts: routed experts of all layers.
        place_bytes: bytes of a place.
        miss_ms: time of one read over the link.
        per_layer: routed experts of a layer.
        per_token: experts that a token takes in a layer.
    """

    misses: int
    staged: int
    ghost_hits: int
    num_ghosts: int
    num_places: int
    num_experts: int
    place_bytes: int
    miss_ms: float
    per_layer: int
    per_token: int
    num_free: int = 0


@dataclass(frozen=True, slots=True)
class PrefixReading:
    """Running totals of the prefix tree: milliseconds its hits saved, milliseconds spent again on what it had
    evicted, bytes evicted; and the bytes it holds now."""

    saved_ms: float
    ghost_ms: float
    evicted_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class RunningReading:
    """How many requests run, and the bytes that pages of all kinds keep from experts: used, kept for later or empty.
    ``prompt_s``: seconds spent on prompts so far, where that is known; else the link's for them stand in."""

    num_running: int = 0
    page_bytes: int = 0
    prompt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Milliseconds saved per byte and second on either side, smoothed."""

    expert: float = 0.0
    prefix: float = 0.0


@dataclass(frozen=True, slots=True)
class MarketDecision:
    """What to do in the coming steps.

    ``evict_bytes``: prefix pages to let go in this step for the sake of expert places (0: none). ``spare_prefixes``:
    a grant that lacks room should take it from expert places before evicting prefixes. ``hold_new``: while others
    run, another request would cost them more than it brings.
    """

    tilt: Tilt = Tilt.HOLD
    evict_bytes: int = 0
    spare_prefixes: bool = False
    hold_new: bool = False


class Market:
    """Keeps the smoothed prices and the direction of flow.

    Args:
        bytes_per_s: how fast prefixes are let go while experts are worth more; up to :data:`URGENT_PACE` times so fast
            where that saves much.
        hysteresis: one side's price must be this many times the other's before bytes begin to flow; they stop when
            the prices meet.
        half_life_s: memory of the smoothing.
    """

    def __init__(self, bytes_per_s: float, hysteresis: float = 1.5, half_life_s: float = 4.0) -> None:
        if bytes_per_s <= 0 or hysteresis < 1 or half_life_s <= 0:
            raise ValueError("market needs bytes_per_s > 0, hysteresis >= 1 and half_life_s > 0")
        self._bytes_per_s = bytes_per_s
        self._hysteresis = hysteresis
        self._half_life_s = half_life_s
        self._tilt = Tilt.HOLD
        self._prices: Prices | None = None
        self._last: tuple[float, ExpertReading, PrefixReading, float] | None = None
        self._ghost_bytes = 0.0
        self._credit_bytes = 0.0
        self._prompt_share = 0.0
        self._decode_share = 0.0

    @property
    def prices(self) -> Prices:
        """The smoothed prices."""
        return self._prices or Prices()

    def step(
        self,
        now_s: float,
        experts: ExpertReading,
        prefixes: PrefixReading,
        running: RunningReading = RunningReading(),
    ) -> MarketDecision:
        """Takes all sides' readings at time ``now_s`` and answers what this step should do. Calls without time in
        between answer as the one before, without further evictions."""
        if self._last is None:
            self._last = (now_s, experts, prefixes, running.prompt_s)
            return MarketDecision()
        elapsed = now_s - self._last[0]
        if elapsed > 0:
            self._smooth(elapsed, experts, prefixes, running.prompt_s)
            self._last = (now_s, experts, prefixes, running.prompt_s)
            self._tilt = self._next_tilt()
            self._credit_bytes += self._pace(prefixes.held_bytes) * elapsed
        missing = experts.num_experts - experts.num_places
        hold_new = missing > 0 and not self._pays(experts, running)
        if self._tilt is not Tilt.TO_EXPERTS or missing <= 0:
            self._credit_bytes = 0.0
            return MarketDecision(self._tilt, 0, self._tilt is Tilt.TO_PREFIXES, hold_new)
        evict = int(min(self._credit_bytes, prefixes.held_bytes))
        self._credit_bytes = 0.0
        return MarketDecision(self._tilt, evict, False, hold_new)

    def _smooth(
        self, elapsed: float, experts: ExpertReading, prefixes: PrefixReading, prompt_s: float
    ) -> None:
        assert self._last is not None
        _, old_experts, old_prefixes, old_prompt_s = self._last
        keep = 0.5 ** (elapsed / self._half_life_s)
        # Evicted bytes are ghosts for about as long as the smoothing remembers.
        self._ghost_bytes = self._ghost_bytes * keep + prefixes.evicted_bytes - old_prefixes.evicted_bytes
        now = Prices(
            _expert_price(elapsed, old_experts, experts),
            _prefix_price(elapsed, old_prefixes, prefixes, self._ghost_bytes),
        )
        staged = _link_share(elapsed, experts, experts.staged - old_experts.staged)
        link = _link_share(elapsed, experts, experts.misses - old_experts.misses)
        prompts = max(staged, min(1.0, (prompt_s - old_prompt_s) / elapsed))
        self._prompt_share = self._prompt_share * keep + prompts * (1 - keep)
        self._decode_share = self._decode_share * keep + (link - staged) * (1 - keep)
        old = self._prices or now
        self._prices = Prices(
            old.expert * keep + now.expert * (1 - keep), old.prefix * keep + now.prefix * (1 - keep)
        )

    def _pace(self, held_bytes: int) -> float:
        urgency = min(1.0, self.prices.expert * held_bytes / URGENT_GAIN_MS)
        return self._bytes_per_s * (1.0 + (URGENT_PACE - 1.0) * urgency)

    def _pays(self, experts: ExpertReading, running: RunningReading) -> bool:
        """Whether one more request brings more than it costs those that run."""
        waiting = _elasticity(experts, running.num_running) * self._decode_share
        return self.prices.expert * running.page_bytes <= 1000.0 * (1.0 - self._prompt_share - waiting)

    def _next_tilt(self) -> Tilt:
        expert, prefix = self.prices.expert, self.prices.prefix
        if self._tilt is Tilt.TO_EXPERTS and expert > prefix:
            return Tilt.TO_EXPERTS
        if self._tilt is Tilt.TO_PREFIXES and prefix > expert:
            return Tilt.TO_PREFIXES
        if expert > self._hysteresis * prefix:
            return Tilt.TO_EXPERTS
        if prefix > self._hysteresis * expert:
            return Tilt.TO_PREFIXES
        return Tilt.HOLD


def _expert_price(elapsed: float, old: ExpertReading, new: ExpertReading) -> float:
    saved_ms = new.miss_ms / elapsed / new.place_bytes
    ghosts = (new.ghost_hits - old.ghost_hits) / new.num_ghosts if new.num_ghosts else 0.0
    missing = new.num_experts - new.num_places
    average = (new.misses - old.misses) / missing if missing > 0 else 0.0
    if new.num_free > FREE_SHARE * new.num_places:
        average = 0.0  # what is missed now is missed because it is new here: it needs no further places
    return max(ghosts, HOTTER * average) * saved_ms


def _prefix_price(elapsed: float, old: PrefixReading, new: PrefixReading, ghost_bytes: float) -> float:
    ghosts = (new.ghost_ms - old.ghost_ms) / ghost_bytes if ghost_bytes > 0 else 0.0
    average = (new.saved_ms - old.saved_ms) / new.held_bytes if new.held_bytes else 0.0
    return max(ghosts, COLDEST_SHARE * average) / elapsed


def _link_share(elapsed: float, experts: ExpertReading, misses: int) -> float:
    """Share of the time that the link needs for so many reads."""
    return min(1.0, misses * experts.miss_ms / 1e3 / elapsed)


def _elasticity(experts: ExpertReading, num_running: int) -> float:
    """By what share distinct experts grow per share of more tokens: d ln D / d ln b of D = E (1 - (1 - k/E)^b)."""
    if num_running == 0 or not experts.per_token:
        return 1.0
    if experts.per_token >= experts.per_layer:
        return 0.0
    others = 1.0 - experts.per_token / experts.per_layer
    untouched = others**num_running
    return -num_running * log(others) * untouched / (1.0 - untouched)
