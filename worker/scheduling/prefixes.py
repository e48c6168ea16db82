"""Where prompts are cut for the prefix cache, when rows are offered to it, and where requests start behind it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memory.api import CHECKPOINT_TOKENS, NO_MATCH, PageKind, PageSpec, PrefixMatch
from worker.scheduling.branches import BranchFinder
from worker.scheduling.budget import last_checkpoint
from worker.scheduling.limits import Limits
from worker.scheduling.request import Request
from worker.scheduling.running import RunningSet


def _block_tokens(specs: Iterable[PageSpec], bundled: bool) -> int:
    """Prefixes are kept up to multiples of this: whole pages in every group, and where a checkpoint may lie."""
    paged = [spec.page_tokens for spec in specs if spec.kind in (PageKind.FULL, PageKind.WINDOW)]
    return int(np.lcm.reduce([*paged, CHECKPOINT_TOKENS if bundled else 1]))


OUTPUTS_A_STEP = 2
"""Of the outputs that have come to where they could be kept, so many are offered in a step; the others come to the next
such place. It bounds the host's work where many outputs run side by side."""


class PrefixPolicy:
    """With STATE or WINDOW pages a prefix is kept only where the state is just then, so chunks of a prompt end where
    one is worth keeping: at the last place that a request with the same prompt could start from, and where earlier
    prompts part from this one. Other chunk ends are offered as they come, some way apart. Of an output the last such
    place is kept, each in place of the one before: nobody knows where it will end, and the next turn starts there."""

    def __init__(self, running: RunningSet, limits: Limits) -> None:
        specs = running.ledger.specs.values()
        self._running = running
        self._limits = limits
        self._rows = running.rows
        kinds = {spec.kind for spec in specs}
        self._bundled = limits.prefix_cache and bool(kinds & {PageKind.STATE, PageKind.WINDOW})
        self._align = _block_tokens(specs, self._bundled or limits.deterministic)
        self._cursor = -1
        self._branches = BranchFinder(self._align) if self._bundled else None

    @property
    def chunk_align(self) -> int:
        """Chunks end at multiples of this where they can."""
        if self._limits.deterministic:
            return CHECKPOINT_TOKENS
        return self._align if self._bundled else 1

    def note(self, request: Request) -> None:
        """A request came: finds where earlier prompts part from it."""
        if self._branches is not None:
            asked = request.asked
            request.branch_tokens = self._branches.visit(asked.prompt_token_ids, asked.cache_salt)

    def match(self, known: tuple[int, ...], salt: str) -> PrefixMatch:
        """What the cache has of a request's tokens; in deterministic mode only up to where a chunk may begin."""
        if not self._limits.prefix_cache:
            return NO_MATCH
        match = self._running.ledger.match(known, salt)
        aligned = match.num_tokens // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
        if self._limits.deterministic and aligned < match.num_tokens:
            # A match leaves at least one token, so this one ends at the aligned place.
            return self._running.ledger.match(known[: aligned + 1], salt) if aligned else NO_MATCH
        return match

    def next_cut(self, request: Request, computed: int, known: int) -> int:
        """The next token count at which a chunk must end, 0 for none. ``known``: tokens of the prefill."""
        cuts = []
        if self._limits.deterministic:
            cuts.append(last_checkpoint(known))  # the prompt's last chunk always begins at the same place
        if self._bundled:
            cuts += [last_checkpoint(known, self._align), request.branch_tokens]
        return min((cut for cut in cuts if cut > computed), default=0)

    def start(self, slot: int, match: PrefixMatch) -> None:
        """A row begins behind ``match``. What comes back from the host for it is kept at once: the next one like it
        need not wait for the link."""
        if not self._limits.prefix_cache:
            return
        if match.host_bytes:
            self._running.offer_checkpoint(slot, match.num_tokens)
        self._rows.next_checkpoint[slot] = self._next_checkpoint(slot)

    def offer(self) -> None:
        """Offers rows to the prefix cache whose count has come to a place where they can be kept."""
        if not self._limits.prefix_cache:
            return
        rows = self._rows
        # The pages of a pass in flight are not written yet.
        due = (rows.requests >= 0) & ~rows.leaving & ~rows.held & (rows.next_checkpoint > 0)
        due &= rows.num_computed >= rows.next_checkpoint
        if self._bundled:
            due &= rows.num_computed % self._align == 0  # a state can be kept only where it is now
        outputs = 0
        slots = np.flatnonzero(due)
        # Rows take turns: those behind the last one offered come first.
        for slot in np.roll(slots, -int(np.searchsorted(slots, self._cursor, side="right"))).tolist():
            computed = int(rows.num_computed[slot])
            rolling = self._bundled and computed > len(rows.occupant(slot).prefill)
            if not rolling or outputs < OUTPUTS_A_STEP:
                self._running.offer_checkpoint(slot, computed // self._align * self._align, rolling)
                outputs += rolling
                self._cursor = slot if rolling else self._cursor
            rows.next_checkpoint[slot] = self._next_checkpoint(slot)

    def _next_checkpoint(self, slot: int) -> int:
        """The token count from which on the row is next offered to the prefix cache, 0 for never."""
        deterministic = self._limits.deterministic
        request, computed = self._rows.occupant(slot), int(self._rows.num_computed[slot])
        prefill = min(len(request.prefill), request.num_prompt) if deterministic else len(request.prefill)
        end = last_checkpoint(prefill, self._align)
        spaced = computed + max(self._align, self._limits.checkpoint_tokens)
        if computed < end:
            return min(place for place in (request.branch_tokens, end, spaced) if place > computed)
        # Pages of an output go to the cache when it ends; a state that is not kept on the way is lost.
        return (
            computed // self._align * self._align + self._align if self._bundled and not deterministic else 0
        )
