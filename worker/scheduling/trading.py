"""Asks the market between steps whether bytes serve better as expert places or as kept prefixes, and has it done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memory.ledger.ledger import ArenaLedger
from memory.ledger.market import ExpertReading, Market, MarketDecision, PrefixReading, RunningReading

EVICTED_SHARE_PER_S = 0.05
"""Prefixes give way to experts by this share of the arena a second, by up to eight times as much where experts wait
badly: a burst's are gone within 3 to 30 seconds."""


@dataclass(frozen=True, slots=True)
class PagedShape:
    """What the market must know of a model's routed experts.

    Attributes:
        num_layers: layers with experts.
        per_layer: experts of a layer.
        per_token: experts that a token takes in a layer.
        place_bytes: bytes of a place.
        link_bytes_per_s: rate at which a missing expert is read.
    """

    num_layers: int
    per_layer: int
    per_token: int
    place_bytes: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ExpertTotals:
    """Running totals from the device: ``misses`` are expert reads over the link, ``staged`` those for prompts,
    ``ghost_hits`` those of decode steps whose expert had lately lost its place; ``num_ghosts`` such experts now."""

    misses: int
    staged: int
    ghost_hits: int = 0
    num_ghosts: int = 0
    num_resident: int | None = None


class ExpertTrader:
    """Trades for one ledger with paged experts; belongs to the loop's thread, between steps."""

    def __init__(self, ledger: ArenaLedger, shape: PagedShape) -> None:
        self._ledger = ledger
        self._shape = shape
        self._market = Market(EVICTED_SHARE_PER_S * ledger.headroom().arena_bytes)
        self._seen = PrefixReading(0.0, 0.0, 0, 0)
        self._scaled = self._seen

    def trade(
        self,
        now_s: float,
        totals: ExpertTotals,
        num_running: int,
        prompt_scale: float = 1.0,
        prompt_s: float = 0.0,
    ) -> MarketDecision:
        """One round at time ``now_s``; the decision is carried out when this returns. ``prompt_scale``: what a token
        of a prompt costs, as a multiple of what the prefix tree takes it to cost. ``prompt_s``: seconds spent on
        prompts so far."""
        shape, usable = self._shape, self._ledger.num_usable_places
        experts = ExpertReading(
            misses=totals.misses,
            staged=totals.staged,
            ghost_hits=totals.ghost_hits,
            num_ghosts=totals.num_ghosts,
            num_places=usable,
            num_experts=shape.num_layers * shape.per_layer,
            place_bytes=shape.place_bytes,
            miss_ms=1e3 * shape.place_bytes / shape.link_bytes_per_s,
            per_layer=shape.per_layer,
            per_token=shape.per_token,
            num_free=0 if totals.num_resident is None else max(0, usable - totals.num_resident),
        )
        kinds = self._ledger.headroom().kinds.values()
        held = sum(
            k.used_bytes + k.pinned_bytes + k.reclaimable_bytes + k.free_bytes + k.pending_bytes
            for k in kinds
        )
        decision = self._market.step(
            now_s, experts, self._prefixes(prompt_scale), RunningReading(num_running, held, prompt_s)
        )
        self._ledger.follow(decision)
        return decision

    def _prefixes(self, prompt_scale: float) -> PrefixReading:
        """The prefix side's totals, each millisecond at its scale when it was counted."""
        old, now = self._seen, self._ledger.prefix_reading()
        self._seen = now
        self._scaled = replace(
            now,
            saved_ms=self._scaled.saved_ms + (now.saved_ms - old.saved_ms) * prompt_scale,
            ghost_ms=self._scaled.ghost_ms + (now.ghost_ms - old.ghost_ms) * prompt_scale,
        )
        return self._scaled
