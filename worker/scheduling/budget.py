"""How many tokens of a step go to whom: decode rows first, but never all of it while prompts wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.api import CHECKPOINT_TOKENS
from worker.scheduling.step import IntArray

PREFILL_SHARE = 4
"""While a prompt waits, at least one token in so many is kept for prefill."""


@dataclass(slots=True)
class StepBudget:
    """Tokens and rows left in the step that is being planned."""

    tokens: int
    rows: int

    def take(self, num_tokens: int) -> None:
        """Spends one row of ``num_tokens``."""
        self.tokens -= num_tokens
        self.rows -= 1


def choose_decode_rows(
    slots: IntArray, last_step: IntArray, max_step_tokens: int, kept_tokens: int
) -> IntArray:
    """The decode rows of a step: all that fit, else those that ran longest ago.

    Args:
        slots: rows that want one token; ascending.
        last_step: per slot, the step it last ran in.
        kept_tokens: tokens that decode rows must leave to prefill.
    """
    room = max(1, max_step_tokens - kept_tokens)
    if len(slots) <= room:
        return slots
    order = np.argsort(last_step[slots], kind="stable")
    return np.sort(slots[order[:room]])


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
