"""How many tokens of a step go to whom: decode rows first, but never all of it while prompts wait."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from memory.api import CHECKPOINT_TOKENS
from worker.scheduling.step import IntArray

PREFILL_SHARE = 4
"""While a prompt waits, at least one token in so many is kept for prefill."""


@dataclass(slots=True)
class StepBudget:
    """Tokens and rows left in the step that is being planned, and where chunks are priced, what they may cost."""

    tokens: int
    rows: int
    cost: float = inf

    def take(self, num_tokens: int, cost: float = 0.0) -> None:
        """Spends one row of ``num_tokens``."""
        self.tokens -= num_tokens
        self.rows -= 1
        self.cost -= cost


def choose_decode_rows(slots: IntArray, room: int, cursor: int) -> tuple[IntArray, int]:
    """The decode rows of a step, at most ``room``, and the cursor for the next step.

    Args:
        slots: rows that want one token; ascending.
        cursor: where rows do not all fit, they take turns behind this slot.
    """
    if len(slots) <= room:
        return slots, cursor
    start = int(np.searchsorted(slots, cursor, side="right"))
    turn = np.take(slots, np.arange(start, start + room), mode="wrap")
    return np.sort(turn), int(turn[-1])


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """Where the chunks of a prefill may end.

    Attributes:
        align: chunks that do not reach the known end stop at absolute multiples of this, where the budget allows.
        strict: a chunk that cannot stop there is not computed now (deterministic mode).
    """

    align: int = 1
    strict: bool = False

    def kept_tokens(self, max_step_tokens: int) -> int:
        """Tokens of a step that decode rows leave to waiting prompts."""
        least = self.align if self.strict else 1
        return min(max(least, max_step_tokens // PREFILL_SHARE), max_step_tokens)

    def length(self, num_computed: int, num_known: int, budget_tokens: int, cut: int = 0) -> int:
        """Tokens of the next chunk, 0 if the budget does not reach the next place where it may end.

        ``cut`` is a token count at which a chunk must end, 0 for none: there the state can be kept as a checkpoint.
        """
        end = min(num_known, num_computed + budget_tokens)
        if num_computed < cut < end:
            end = cut
        if end < num_known:
            aligned = end // self.align * self.align
            if aligned > num_computed or self.strict:
                end = aligned
        return max(0, end - num_computed)


def last_checkpoint(num_tokens: int, align: int = CHECKPOINT_TOKENS) -> int:
    """Last aligned position at which a later request with the same ``num_tokens`` tokens could start: at least one
    token must be computed behind it."""
    return max(0, num_tokens - 1) // align * align
