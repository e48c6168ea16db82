"""How token sequences cut into the prefix tree's blocks, and which pages a checkpoint's bundle must hold."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm

from memory.api import CHECKPOINT_TOKENS, PageKind

Offer = Mapping[str, tuple[int, tuple[int, ...]]]
"""Pages by group: (first logical page, virtual ids from there on)."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What the tree must know of a page group. ``window``, WINDOW only: the tokens a query sees, itself included."""

    kind: PageKind
    page_tokens: int
    page_bytes: int
    window: int | None = None


def first_visible_page(num_tokens: int, window: int, page_tokens: int) -> int:
    """First logical WINDOW page that the query at position ``num_tokens`` or any later one can see (it sees positions
    ``num_tokens - window + 1`` and up). Pages below it may be let go."""
    return max(0, num_tokens - window + 1) // page_tokens


class Blocks:
    """The block length that suits a set of groups, hashes of blocks, and the pages that belong to them.

    A block is the least run of tokens that is whole pages in every token-paged group; with STATE or WINDOW groups it
    is a multiple of CHECKPOINT_TOKENS as well.
    """

    def __init__(self, groups: Mapping[str, GroupRule], model: str) -> None:
        self.rules = {name: rule for name, rule in groups.items() if rule.kind is not PageKind.EXPERT}
        self.full = tuple(name for name, rule in self.rules.items() if rule.kind is PageKind.FULL)
        self.bundled = tuple(name for name, rule in self.rules.items() if rule.kind is not PageKind.FULL)
        paged = [rule.page_tokens for rule in self.rules.values() if rule.kind is not PageKind.STATE]
        self.tokens = lcm(*paged, *((CHECKPOINT_TOKENS,) if self.bundled else ()))
        self.full_pages = tuple(self.tokens // self.rules[name].page_tokens for name in self.full)
        self.full_bytes = sum(
            count * self.rules[name].page_bytes
            for name, count in zip(self.full, self.full_pages, strict=True)
        )
        self._model = model

    def digests(self, token_ids: Sequence[int], end: int, salt: str) -> Iterator[bytes]:
        """The chained content hash of each whole block of ``token_ids[:end]``: model, salt and all tokens so far."""
        digest = self._seed(salt)
        for first in range(0, end - self.tokens + 1, self.tokens):
            digest = self._digest(digest, token_ids[first : first + self.tokens])
            yield digest

    def extend_digests(self, digests: list[bytes], token_ids: Sequence[int], end: int, salt: str) -> None:
        """Appends to ``digests``, those of the first blocks, what lacks of ``token_ids[:end]``'s."""
        done = len(digests) * self.tokens
        digest = digests[-1] if digests else self._seed(salt)
        for first in range(done, end - self.tokens + 1, self.tokens):
            digest = self._digest(digest, token_ids[first : first + self.tokens])
            digests.append(digest)

    def _seed(self, salt: str) -> bytes:
        return blake2b(f"{self._model}\0{salt}".encode(), digest_size=16).digest()

    def _digest(self, before: bytes, block: Sequence[int]) -> bytes:
        return blake2b(array("q", block).tobytes(), digest_size=16, key=before).digest()

    def bundle_span(self, name: str, num_tokens: int) -> tuple[int, int]:
        """Logical pages [low, high) of one STATE or WINDOW group in a bundle at ``num_tokens``."""
        rule = self.rules[name]
        if rule.window is None:
            return 0, 1
        high = num_tokens // rule.page_tokens
        return min(first_visible_page(num_tokens, rule.window, rule.page_tokens), high), high

    def bundle_pages(self, num_tokens: int, offer: Offer) -> dict[str, tuple[int, ...]] | None:
        """The part of ``offer`` that a bundle at ``num_tokens`` needs; None where something is missing."""
        found: dict[str, tuple[int, ...]] = {}
        for name in self.bundled:
            first, ids = offer.get(name, (0, ()))
            low, high = self.bundle_span(name, num_tokens)
            if first > low or first + len(ids) < high:
                return None
            found[name] = tuple(ids[low - first : high - first])
        return found

    def num_covered(self, num_known: int, num_blocks: int, offer: Offer) -> int:
        """How many leading blocks can be in the tree when ``num_known`` are and ``offer`` brings the rest."""
        covered = num_blocks
        for name, count in zip(self.full, self.full_pages, strict=True):
            first, ids = offer.get(name, (0, ()))
            reach = (first + len(ids)) // count if first <= num_known * count else 0
            covered = min(covered, max(num_known, reach))
        return covered

    def block_pages(self, index: int, offer: Offer) -> tuple[tuple[int, ...], ...]:
        """The offered FULL pages of block ``index``, group by group; shorter where the offer does not reach."""
        found = []
        for name, count in zip(self.full, self.full_pages, strict=True):
            first, ids = offer.get(name, (0, ()))
            low = index * count - first
            found.append(tuple(ids[max(0, low) : max(0, low + count)]))
        return tuple(found)
