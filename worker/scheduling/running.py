"""The running requests and their memory: who gets pages, who waits a step for them, and who is sent back."""

from __future__ import annotations

from collections.abc import Callable

from memory.api import CHECKPOINT_TOKENS, NO_MATCH, Ledger, PageAsk, PageKind, PrefixMatch, Shortage
from memory.ledger.retraction import RetractionCandidate, choose_victim
from worker.scheduling.request import Request
from worker.scheduling.rows import RowTable
from worker.scheduling.tables import PageTables


class RunningSet:
    """Rows, page tables and the ledger, changed together.

    Args:
        ledger: the book of pages.
        rows: the running requests as arrays.
        keep_prefixes: whether released pages are offered to the prefix cache.
        keep_outputs: whether that includes what was computed one token at a time.
        on_sent_back: called with each request that lost its pages and must wait again.
    """

    def __init__(
        self,
        ledger: Ledger,
        rows: RowTable,
        keep_prefixes: bool,
        keep_outputs: bool,
        on_sent_back: Callable[[Request], None],
    ) -> None:
        self.ledger = ledger
        self.rows = rows
        self.tables = PageTables(ledger.specs, len(rows.requests))
        self.num_releases = 0
        """grows whenever somebody gave memory back"""
        self.disturbed = False
        """whether somebody lacked memory since ``begin``"""
        self._keep_prefixes = keep_prefixes
        self._keep_outputs = keep_outputs
        self._on_sent_back = on_sent_back
        self._recurrent = any(spec.kind is PageKind.STATE for spec in ledger.specs.values())
        self._coming_bytes = 0
        self._claimed_bytes = 0

    def begin(self) -> None:
        """A new step is planned."""
        self.disturbed = False
        self._claimed_bytes = 0
        leaving = self.rows.leaving.nonzero()[0].tolist()
        self._coming_bytes = sum(self.ledger.release_bytes(int(self.rows.requests[slot])) for slot in leaving)

    def admit(self, request: Request, match: PrefixMatch, num_tokens: int) -> int | Shortage:
        """Takes a request in with room for ``num_tokens`` tokens: its slot, or what is missing."""
        answer = self.ledger.grant(PageAsk(request.number, num_tokens, match.num_tokens, match))
        if isinstance(answer, Shortage):
            return answer
        slot = self.rows.place(request, match.num_tokens, self.ledger.capacity_tokens(request.number))
        self.rows.num_kept[slot] = match.num_tokens
        self.tables.start(slot, request.number, self.ledger)
        return slot

    def ensure_room(self, slot: int, num_tokens: int) -> bool:
        """Room for a row's first ``num_tokens`` tokens; False: the row does not run in this step.

        Where memory is short, frees on their way are waited for; only what they do not cover is got by sending
        somebody back, the row itself perhaps.
        """
        rows = self.rows
        number = int(rows.requests[slot])
        ask = PageAsk(number, num_tokens, int(rows.num_computed[slot]), NO_MATCH)
        while True:
            answer = self.ledger.grant(ask)
            if not isinstance(answer, Shortage):
                rows.capacity[slot] = self.ledger.capacity_tokens(number)
                self.tables.extend(slot, number, answer, self.ledger)
                return True
            if answer.never:
                raise RuntimeError(
                    f"request {number} was admitted, but {num_tokens} tokens can never fit: {answer}"
                )
            self.disturbed = True
            missing = sum(answer.missing_bytes.values())
            if self._claimed_bytes + missing <= answer.pending_bytes + self._coming_bytes:
                self._claimed_bytes += missing
                return False
            victim = self._choose_victim(missing)
            if victim is None:
                return False
            self.send_back(victim)
            if not rows.holds(slot, number):
                return False

    def _choose_victim(self, missing_bytes: int) -> int | None:
        """The slot of the row to send back; None if only one is left."""
        rows = self.rows
        # A pass in flight keeps its rows: its bytes have come over the link for them.
        staying = ~(rows.leaving | rows.held)
        slots = {int(rows.requests[slot]): slot for slot in rows.taken().tolist() if staying[slot]}
        if len(slots) < 2:
            return None
        candidates = [
            RetractionCandidate(
                number,
                int(rows.num_computed[slot]),
                int(rows.num_kept[slot]),
                self.ledger.release_bytes(number),
                number,
            )
            for number, slot in slots.items()
        ]
        chosen = choose_victim(candidates, missing_bytes)
        return None if chosen is None else slots[chosen.request]

    def send_back(self, slot: int) -> None:
        """Retracts a row: at once, or when the step in flight is applied if it takes part in one."""
        if self.rows.steps_in_flight[slot]:
            self._coming_bytes += self.ledger.release_bytes(int(self.rows.requests[slot]))
            self.rows.leaving[slot] = True
            return
        request = self.release(slot)
        request.num_retractions += 1
        self._on_sent_back(request)

    def release(self, slot: int) -> Request:
        """Ends a row; its computed pages are offered to the prefix cache."""
        rows = self.rows
        number, num_computed = int(rows.requests[slot]), int(rows.num_computed[slot])
        request = rows.vacate(slot)
        self.tables.stop(slot)
        kept = self._num_kept(request, num_computed) if self._keep_prefixes else 0
        self.ledger.release(number, request.known_token_ids()[:kept], kept, request.asked.cache_salt)
        self.num_releases += 1
        return request

    def _num_kept(self, request: Request, num_computed: int) -> int:
        """Leading tokens whose pages later requests may share, the states as they stand now included."""
        kept = min(num_computed, request.num_known - 1)
        if not self._keep_outputs:
            kept = min(kept, request.num_prompt) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
        if self._recurrent and kept != num_computed:
            return 0  # the state is past them, by a step in flight or by output that is not to be shared
        return kept

    def offer_checkpoint(self, slot: int, num_tokens: int, rolling: bool = False) -> bool:
        """Offers a row's first ``num_tokens`` tokens to the prefix cache; its state must be just there. ``rolling``:
        in place of the row's last one offered so."""
        rows = self.rows
        rows.flush(slot)
        request = rows.occupant(slot)
        tokens = request.known_token_ids()[:num_tokens]
        kept = self.ledger.checkpoint(request.number, tokens, num_tokens, request.asked.cache_salt, rolling)
        if kept:
            rows.num_kept[slot] = num_tokens
        if kept and self._recurrent:
            # The ledger may have kept the page itself and gone on with a copy.
            self.tables.refresh(slot, request.number, self.ledger, PageKind.STATE)
        return kept
