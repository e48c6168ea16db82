"""Finds where prompts that began alike part, so that a state can be kept just there for those that follow."""

from __future__ import annotations

from collections import OrderedDict

MOST_BLOCKS = 1 << 16
"""Blocks of recent prompts that are remembered: four million tokens in blocks of 64."""


class BranchFinder:
    """Remembers the beginnings of recent prompts, block by block.

    A checkpoint at the end of a prompt helps only those that continue it. Prompts with a common beginning, such as one
    system prompt, part somewhere inside: the second one shows where, and keeps its state there.

    Args:
        block_tokens: states can be kept at multiples of this.
    """

    def __init__(self, block_tokens: int, most_blocks: int = MOST_BLOCKS) -> None:
        self._block_tokens = block_tokens
        self._most_blocks = most_blocks
        self._seen: OrderedDict[int, None] = OrderedDict()

    def visit(self, token_ids: tuple[int, ...], salt: str) -> int:
        """How many leading tokens an earlier prompt of this salt shares with this one, in whole blocks; this one is
        remembered from now on."""
        size, seen = self._block_tokens, self._seen
        shared, chain = 0, hash(salt)
        for first in range(0, len(token_ids) - size + 1, size):
            chain = hash((chain, token_ids[first : first + size]))
            if chain in seen:
                seen.move_to_end(chain)
                shared = first + size
            else:
                seen[chain] = None
        while len(seen) > self._most_blocks:
            seen.popitem(last=False)
        return shared
