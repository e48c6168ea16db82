"""Keeps what a prefill pass needs while it is in flight: its rows held, their pages pinned, its ring of places.

A pass computes chunks of prompts layer by layer while decode steps are planned and run behind it. Pinned pages neither
move nor are used again, so steps behind it may end before it does; held rows are planned no further until it has ended.
"""

from __future__ import annotations

from memory.api import Ledger, PageKind, PlaceRange
from memory.ledger.ledger import ArenaLedger
from worker.scheduling.budget import StepBudget
from worker.scheduling.limits import PRICE_SPARE, Limits
from worker.scheduling.rows import RowTable
from worker.scheduling.step import IntArray, StepPlan

LEAST_RING_PLACES = 8
"""With fewer, copies of single experts wait for each other; missing experts are read in place then."""
LEAST_SHARE = 0.5
"""Of the largest pass: no prompt is cut into smaller ones, even where nothing is missing."""
RING_SHARE = 0.5
"""Of the gap, at most: what bands may want meanwhile stays free."""


class PassKeeper:
    """One pass at a time; belongs to the scheduler."""

    def __init__(self, ledger: Ledger, rows: RowTable, limits: Limits) -> None:
        self._ledger = ledger
        self._rows = rows
        self._rule = limits.ring
        self._price = limits.price
        self._most_tokens = limits.pass_tokens
        self.num_resident = 0
        """experts that have places, as far as the host has heard"""
        self._pins: list[int] = []
        self._ring: PlaceRange | None = None

    @property
    def is_open(self) -> bool:
        """Whether a pass is in flight."""
        return bool(self._pins)

    def budget(self, num_rows: int) -> StepBudget:
        """Of a pass that is being planned, for so many rows at most."""
        if self._price is None:
            return StepBudget(self._most_tokens, num_rows)
        most = (1.0 + PRICE_SPARE) * self._price.cost(0, self._most_tokens)
        return StepBudget(self._most_tokens, num_rows, most)

    def most_tokens(self, num_computed: int, num_known: int, budget: StepBudget) -> int:
        """Of the next chunk of a prompt that has so many tokens, so many of them computed, by the pass's budget."""
        price = self._price
        if price is None or num_known <= num_computed:
            return budget.tokens
        most = price.cost(0, self._most_tokens)
        priced = max(LEAST_SHARE * most, self._num_missing() * price.expert_tokens)
        share = price.share(num_computed, num_known, priced, most)
        if share >= price.cost(num_computed, num_known - num_computed):  # all of it, whatever rounding says
            share *= 1.0 + 1e-6
        return min(budget.tokens, price.tokens(num_computed, min(share, budget.cost)))

    def cost(self, num_computed: int, num_tokens: int) -> float:
        """Of a chunk, by the pass's budget."""
        return 0.0 if self._price is None else self._price.cost(num_computed, num_tokens)

    def _num_missing(self) -> int:
        rule = self._rule
        return 0 if rule is None else max(0, rule.num_layers * rule.num_experts - self.num_resident)

    def open(self, slots: IntArray, num_tokens: int) -> PlaceRange | None:
        """A pass of these rows is being planned, in the open step; answers its ring."""
        if self.is_open:
            raise RuntimeError("a prefill pass is in flight already")
        self._rows.held[slots] = True
        self._pins = [self._ledger.pin(int(number)) for number in self._rows.requests[slots]]
        self._ring = self._take_ring(num_tokens)
        return self._ring

    def close(self, plan: StepPlan) -> None:
        """The pass has ended; its result is about to be applied."""
        self._rows.held[plan.slots] = False
        for pin in self._pins:
            self._ledger.unpin(pin)
        self._pins = []
        if self._ring is not None and isinstance(self._ledger, ArenaLedger):
            self._ledger.return_ring(self._ring)
        self._ring = None

    def _take_ring(self, num_tokens: int) -> PlaceRange | None:
        ledger, rule = self._ledger, self._rule
        if not isinstance(ledger, ArenaLedger) or rule is None or num_tokens < rule.least_tokens:
            return None
        place_bytes = max(
            (s.page_bytes for s in ledger.specs.values() if s.kind is PageKind.EXPERT), default=0
        )
        if not place_bytes:
            return None
        most = int(RING_SHARE * ledger.headroom().gap_bytes / place_bytes)
        resident = min(self.num_resident, ledger.num_usable_places)
        num_places = min(rule.places(resident), most) // 2 * 2  # two halves
        while num_places >= LEAST_RING_PLACES:
            ring = ledger.take_ring(num_places)
            if ring is not None:
                return ring
            num_places = num_places // 4 * 2
        return None
