"""Keeps copies of cached pages in the host tier, by content, and finds prefixes there that the tree has lost.

Pages are written through: soon after the tree takes a page, and within a byte budget a step, a copy goes to the host.
So an eviction never waits for the link, and its bytes are free at once. A prefix that is matched here comes back by
copies ahead of its first step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memory.api import LedgerError, PageCopy, PageKind
from memory.ledger.book import PageBook
from memory.ledger.host_tier import HostTier
from memory.ledger.prefix_blocks import Blocks, Offer
from memory.ledger.prices import RecomputeCost

Key = tuple[bytes, int]
"""(hash of all tokens to the end of a block, the page's number inside the block); -1 for a state."""
STATE_PAGE = -1
LINK_BYTES_PER_S = 50e9
"""Rate at which pages come back: a copy engine's over PCIe 5 x16, rounded down."""


@dataclass(frozen=True, slots=True)
class HostMatch:
    """A prefix of ``num_tokens`` of which the first ``base_tokens`` are in the tree and the rest here.

    ``pages[group number] = (first logical page, keys)`` must be copied back.
    """

    num_tokens: int
    num_bytes: int
    pages: Mapping[int, tuple[int, tuple[Key, ...]]]


class HostSpill:
    """The host tier behind the prefix tree of a book.

    Args:
        book: the pages.
        tier: slots in host memory; its ids are numbers given here, one per content.
        budget_bytes: most bytes copied to the host per step.
        blocks: the prefix tree's.
        cost: of computing what could come back.
    """

    def __init__(
        self, book: PageBook, tier: HostTier, budget_bytes: int, blocks: Blocks, cost: RecomputeCost
    ) -> None:
        self.tier = tier
        self._book = book
        self._budget_bytes = budget_bytes
        self._blocks = blocks
        self._cost = cost
        self._names = [pool.spec.name for pool in book.pools]
        self._ids: list[dict[Key, int]] = [{} for _ in book.pools]
        self._keys: list[dict[int, Key]] = [{} for _ in book.pools]
        self._next_id = 0
        self._waiting: deque[tuple[int, int, Key]] = deque()  # (group, virtual page, content)
        self._content: list[dict[int, Key]] = [{} for _ in book.pools]  # of cached virtual pages
        self._rolling: set[tuple[int, int]] = set()  # (group, virtual page) whose copies are not due yet
        self._coming: list[
            tuple[int, int, int]
        ] = []  # (group, id, virtual page): copies back, until handed out
        self._busy: deque[tuple[int, list[tuple[int, int]]]] = deque()  # (step, slots its copies use)
        self._leaving: set[tuple[int, int]] = set()  # (group, id): forgotten while a copy used the slot
        self._stored_bytes = self._brought_bytes = 0

    # -- to the host ---------------------------------------------------------------------------------------------

    def kept(
        self, digests: Sequence[bytes], offer: Offer, kept: Mapping[str, Sequence[int]], rolling: bool
    ) -> None:
        """The tree took ``kept`` out of ``offer``, whose blocks have these hashes: copies of them are due; of a
        ``rolling`` bundle only when it stays, see :meth:`stays`."""
        for name, pages in kept.items():
            group = self._book.number[name]
            taken = set(pages)
            first, ids = offer[name]
            waits = rolling and name in self._blocks.bundled
            for offset, virtual in enumerate(ids):
                if virtual in taken:
                    key = self._key(group, first + offset, digests)
                    self._content[group][virtual] = key
                    if waits:
                        self._rolling.add((group, virtual))
                    else:
                        self._waiting.append((group, virtual, key))

    def stays(self, pages: Mapping[str, Sequence[int]]) -> None:
        """A rolling bundle of these pages was the last of its request: copies are due now."""
        for name, ids in pages.items():
            group = self._book.number[name]
            for virtual in ids:
                if (group, virtual) in self._rolling:
                    self._rolling.remove((group, virtual))
                    self._waiting.append((group, virtual, self._content[group][virtual]))

    def forget(self, group: int, virtual: int) -> None:
        """The tree lets a page go; a copy that is still due is given up."""
        self._content[group].pop(virtual, None)
        self._rolling.discard((group, virtual))

    def _key(self, group: int, logical: int, digests: Sequence[bytes]) -> Key:
        rule = self._blocks.rules[self._names[group]]
        if rule.kind is PageKind.STATE:
            return digests[-1], STATE_PAGE
        per_block = self._blocks.tokens // rule.page_tokens
        return digests[logical // per_block], logical % per_block

    # -- from the host -------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], salt: str, base_tokens: int, limit: int) -> HostMatch | None:
        """The longest prefix of ``token_ids[:limit]`` that the tree's ``base_tokens`` and the host make up together;
        None if the host adds nothing that is copied sooner than it is computed."""
        digests = list(self._blocks.digests(token_ids, limit, salt))
        base = base_tokens // self._blocks.tokens
        end = base
        while end < len(digests) and self._has_full(digests, end):
            end += 1
        while end > base:
            pages = self._pages_at(digests[:end], base)
            if pages is not None:
                num_bytes = sum(
                    len(keys) * self._book.pools[group].page_bytes for group, (_, keys) in pages.items()
                )
                num_tokens = end * self._blocks.tokens
                if self._cost.span_ms(base_tokens, num_tokens) > 1e3 * num_bytes / LINK_BYTES_PER_S:
                    return HostMatch(num_tokens, num_bytes, pages)
            end -= 1
        return None

    def _has_full(self, digests: Sequence[bytes], block: int) -> bool:
        counts = zip(self._blocks.full, self._blocks.full_pages, strict=True)
        return all(
            (digests[block], page) in self._ids[self._book.number[name]]
            for name, count in counts
            for page in range(count)
        )

    def _pages_at(self, digests: Sequence[bytes], base: int) -> dict[int, tuple[int, tuple[Key, ...]]] | None:
        """What a match that ends with the last of ``digests`` needs from the host; None where something is missing."""
        pages: dict[int, tuple[int, tuple[Key, ...]]] = {}
        for name, count in zip(self._blocks.full, self._blocks.full_pages, strict=True):
            keys = tuple((digest, page) for digest in digests[base:] for page in range(count))
            pages[self._book.number[name]] = (base * count, keys)
        for name in self._blocks.bundled:
            group = self._book.number[name]
            low, high = self._blocks.bundle_span(name, len(digests) * self._blocks.tokens)
            keys = tuple(self._key(group, logical, digests) for logical in range(low, high))
            if not all(key in self._ids[group] for key in keys):
                return None
            pages[group] = (low, keys)
        return pages

    def bring(self, group: int, key: Key, virtual: int) -> None:
        """Queues the copy of a page back, ahead of the next step; both sides are held until it has run."""
        number = self._ids[group][key]
        self.tier.pin(self._names[group], number)
        self._book.tables[group].hold(virtual)
        self._coming.append((group, number, virtual))

    # -- a step's life -------------------------------------------------------------------------------------------

    def take_back(self, step: int) -> tuple[PageCopy, ...]:
        """The copies from the host ahead of ``step``, to be run before all others."""
        copies: list[PageCopy] = []
        for group, number, virtual in self._coming:
            physical = self._book.tables[group].physical[virtual]
            copies.append(PageCopy(self._names[group], self._slot(group, number), physical, from_host=True))
            self._book.written_by(group, virtual, step)
            self._book.read_by(group, virtual, step)
            self._brought_bytes += self._book.pools[group].page_bytes
        self._use(step, [(group, number) for group, number, _ in self._coming])
        self._coming.clear()
        return tuple(copies)

    def take_out(self, step: int) -> tuple[PageCopy, ...]:
        """The copies to the host ahead of ``step``, within the budget, to be run behind all others."""
        copies: list[PageCopy] = []
        used: list[tuple[int, int]] = []
        left = self._budget_bytes
        while self._waiting and left > 0:
            group, virtual, key = self._waiting.popleft()
            if self._content[group].get(virtual) != key or key in self._ids[group]:
                continue
            number = self._store(group, key)
            if number is None:
                continue
            physical = self._book.tables[group].physical[virtual]
            copies.append(PageCopy(self._names[group], physical, self._slot(group, number), to_host=True))
            self._book.tables[group].hold(virtual)
            self._book.read_by(group, virtual, step)
            used.append((group, number))
            left -= self._book.pools[group].page_bytes
            self._stored_bytes += self._book.pools[group].page_bytes
        self._use(step, used)
        return tuple(copies)

    def _use(self, step: int, slots: list[tuple[int, int]]) -> None:
        if slots:
            self._busy.append((step, slots))

    def _slot(self, group: int, number: int) -> int:
        slot = self.tier.find(self._names[group], number)
        if slot is None:
            raise LedgerError(
                f"{self._names[group]}: content {number} left the host tier while it was pinned"
            )
        return slot

    def retire(self, completed_step: int) -> None:
        """Steps up to ``completed_step`` have finished: their copies no longer use their slots."""
        while self._busy and self._busy[0][0] <= completed_step:
            for group, number in self._busy.popleft()[1]:
                self.tier.unpin(self._names[group], number)
                if (group, number) in self._leaving and not self.tier.pinned(self._names[group], number):
                    self._leaving.remove((group, number))
                    self.tier.drop(self._names[group], number)

    def clear(self) -> int:
        """Forgets every content that lies here, answers the bytes. A slot that a copy uses empties when it has run."""
        freed = 0
        for group, name in enumerate(self._names):
            self._ids[group].clear()
            for number in self._keys[group]:
                freed += self._book.pools[group].page_bytes
                if self.tier.pinned(name, number):
                    self._leaving.add((group, number))
                else:
                    self.tier.drop(name, number)
            self._keys[group].clear()
        return freed

    def _store(self, group: int, key: Key) -> int | None:
        """A pinned slot for a content, others put out for it if need be; None where the tier has none."""
        number = self._next_id
        stored = self.tier.store(self._names[group], number)
        if stored is None:
            return None
        self._next_id += 1
        for page in stored.evicted:
            other = self._book.number[page.group]
            del self._ids[other][self._keys[other].pop(page.virtual)]
        self._ids[group][key] = number
        self._keys[group][number] = key
        self.tier.pin(self._names[group], number)
        return number

    def report(self) -> dict[str, Any]:
        """What lies here, what waits to be copied here, and bytes copied since the start, for operators."""
        return {
            "budget_bytes": self.tier.budget_bytes,
            "used_bytes": self.tier.used_bytes,
            "pages": dict(self.tier.num_pages()),
            "waiting_pages": len(self._waiting),
            "stored_bytes": self._stored_bytes,
            "brought_back_bytes": self._brought_bytes,
        }

    def queued_holds(self) -> list[tuple[int, int]]:
        """(group, virtual page) of every hold by a copy back, for the audit."""
        return [(group, virtual) for group, _, virtual in self._coming]
