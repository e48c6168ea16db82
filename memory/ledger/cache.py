"""Joins the prefix tree to the page book: what the tree takes, shares and lets go becomes holds on virtual pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memory.api import NO_MATCH, PageKind, PrefixMatch
from memory.ledger.book import PageBook
from memory.ledger.holding import NO_NODE, Holding, Run
from memory.ledger.market import PrefixReading
from memory.ledger.prefix_tree import Inserted, PrefixTree, TreeMatch
from memory.ledger.spill import HostMatch, HostSpill

_HOST_NODE = -2
"""Keys of matches that need the host tier: -2, -3, ... in the order in which the step made them."""


class RoomFor(Protocol):
    """Makes room for pages by group number, evicting where needed; False if there is none."""

    def __call__(self, need: Mapping[int, int]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Found:
    """What a match brings: pages of the tree to share by group number, as (first logical page, ids), states of the
    tree to copy, and what must come back from the host. ``node`` is to be locked meanwhile, if there is one."""

    node: int
    shared: Mapping[int, tuple[int, tuple[int, ...]]]
    states: Mapping[int, int]
    host: HostMatch | None = None


class PrefixCache:
    """The prefix tree over the pages of a book, and the host tier behind it if there is one."""

    def __init__(self, book: PageBook, tree: PrefixTree, spill: HostSpill | None = None) -> None:
        self._book = book
        self._tree = tree
        self._spill = spill
        kinds = [pool.spec.kind for pool in book.pools]
        self._states = [group for group, kind in enumerate(kinds) if kind is PageKind.STATE]
        self._fulls = [group for group, kind in enumerate(kinds) if kind is PageKind.FULL]
        self._bundled = len(self._fulls) < len(kinds)
        self._uses: list[int] = []  # nodes whose bundles are locked until the step's copies are handed out
        self._from_host: list[
            tuple[HostMatch, int]
        ] = []  # matches of this step: what the host adds, and to which node

    @property
    def tree(self) -> PrefixTree:
        """The tree."""
        return self._tree

    # -- reading -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Matches of the step before are no longer valid."""
        self._from_host.clear()

    def match(self, token_ids: Sequence[int], salt: str) -> PrefixMatch:
        """The longest cached prefix that leaves at least one token to compute."""
        limit = len(token_ids) - 1
        found = self._tree.match(token_ids, salt, limit)
        if self._spill is not None:
            more = self._spill.match(token_ids, salt, found.num_tokens, limit)
            if more is not None:
                self._from_host.append((more, found.node))
                return PrefixMatch(more.num_tokens, more.num_bytes, _HOST_NODE - len(self._from_host) + 1)
        return PrefixMatch(found.num_tokens, 0, found.node) if found.num_tokens else NO_MATCH

    def open(self, match: PrefixMatch) -> Found | None:
        """What a match brings now; None if it was evicted since."""
        host: HostMatch | None = None
        node = match.node
        if node <= _HOST_NODE:
            if _HOST_NODE - node >= len(self._from_host):
                return None
            host, node = self._from_host[_HOST_NODE - node]
        base = self._tree.at(node) if node != NO_NODE else TreeMatch()
        if node != NO_NODE and not base.num_tokens:
            return None
        names = {group: self._name(group) for group in range(len(self._book.pools))}
        if host is None:
            shared = {g: (base.first[n], base.pages[n]) for g, n in names.items() if g not in self._states}
            return Found(node, shared, {group: base.pages[names[group]][0] for group in self._states})
        shared = {group: (0, base.pages.get(names[group], ())) for group in self._fulls}
        shared |= {group: (first, ()) for group, (first, _) in host.pages.items() if group not in self._fulls}
        return Found(node, shared, {}, host)

    def lock(self, node: int) -> None:
        """Keeps a match from eviction, its bundle included, while room is made for its request."""
        if node != NO_NODE:
            self._tree.lock(node)

    def unlock(self, node: int) -> None:
        """Ends :meth:`lock`."""
        if node != NO_NODE:
            self._tree.unlock(node)

    def share(self, holding: Holding, found: Found) -> None:
        """Gives a request, whose runs have their own pages already, what a locked match brings; the lock ends with
        :meth:`end_uses`. States are not shared: the request's own page takes a copy ahead of the step."""
        book = self._book
        for group, (_, pages) in found.shared.items():
            for page in pages:
                book.tables[group].hold(page)
        for group, page in found.states.items():
            book.tables[group].hold(holding.runs[group].pages[0])
            book.copy(group, page, holding.runs[group].pages[0])
        if found.host is not None and self._spill is not None:
            for group, (first, keys) in found.host.pages.items():
                run = holding.runs[group]
                for logical, key in enumerate(keys, first):
                    self._spill.bring(group, key, run.pages[logical - run.first])
        if found.node != NO_NODE:
            self._tree.lock(found.node, bundle=False)
            self._uses.append(found.node)
            holding.node = found.node

    def end_uses(self) -> None:
        """The step's copies are handed out: bundles that were only read from may be evicted again."""
        for node in self._uses:
            self._tree.unlock(node)
        self._uses.clear()

    # -- keeping -------------------------------------------------------------------------------------------------

    def checkpoint(
        self,
        holding: Holding,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str,
        room_for: RoomFor,
        rolling: bool = False,
    ) -> bool:
        """Offers a running request's pages up to ``num_tokens``; its states are copied ahead of the next step."""
        if self._bundled and num_tokens % self._tree.block_tokens:
            return False
        self._tree.blocks.extend_digests(holding.digests, token_ids, num_tokens, salt)
        digests = holding.digests[: num_tokens // self._tree.block_tokens]
        if self._states:
            if digests and self._tree.holds_bundle(digests[-1]):
                return True
            if not room_for(dict.fromkeys(self._states, 1)):
                return False
        offer = self._offer(holding)
        copies = {}
        for group in self._states:
            copies[group] = self._book.new_page(group)
            offer[self._name(group)] = (0, (copies[group],))
        inserted = self._insert(token_ids, num_tokens, salt, offer, digests, rolling)
        for group, page in copies.items():
            if page in inserted.kept.get(self._name(group), ()):
                self._book.copy(group, holding.runs[group].pages[0], page)
            else:
                self._book.drop(group, page)
        if inserted.node == NO_NODE:
            return False
        if not any(inserted.duplicate.get(self._name(group)) for group in self._fulls):
            self._tree.lock(inserted.node, bundle=False)
            self._unlock_path(holding)
            holding.node = inserted.node
        if rolling:
            if holding.rolling_node != NO_NODE:
                self.forget(self._tree.supersede(holding.rolling_node, by=inserted.node).pages)
            holding.rolling_node = inserted.node
        return True

    def donate(self, holding: Holding, token_ids: Sequence[int], num_computed_tokens: int, salt: str) -> None:
        """Offers the pages of a request that ends. A state goes with them only if it is exactly at a checkpoint."""
        end = min(num_computed_tokens, len(token_ids))
        if not self._states:
            end -= end % self._tree.block_tokens
        if end:
            self._tree.blocks.extend_digests(holding.digests, token_ids, end, salt)
            digests = holding.digests[: end // self._tree.block_tokens]
            self._insert(token_ids, end, salt, self._offer(holding), digests)

    def leave(self, holding: Holding) -> None:
        """The request ends: it no longer needs its node, and its last rolling checkpoint stays."""
        self._unlock_path(holding)
        if holding.rolling_node != NO_NODE and self._spill is not None:
            self._spill.stays(self._tree.at(holding.rolling_node).pages)
        holding.rolling_node = NO_NODE

    def _unlock_path(self, holding: Holding) -> None:
        if holding.node != NO_NODE:
            self._tree.unlock(holding.node, bundle=False)
            holding.node = NO_NODE

    def evict(self, need: Mapping[int, int]) -> int:
        """Lets cached pages go until ``need`` bytes by group number have; answers the bytes."""
        evicted = self._tree.evict({self._name(group): num_bytes for group, num_bytes in need.items()})
        return self.forget(evicted.pages)

    def reclaimable_bytes(self) -> list[int]:
        """By group number, bytes that eviction brings: pages that nobody but the tree holds, and that may go."""
        evictable = self._tree.evictable_bytes()
        return [
            min(table.num_cached_only * pool.page_bytes, evictable.get(table.group, 0))
            for pool, table in zip(self._book.pools, self._book.tables, strict=True)
        ]

    def reading(self) -> PrefixReading:
        """Running totals for the market."""
        use = self._tree.use
        return PrefixReading(
            use.saved_ms, use.ghost_ms, use.evicted_bytes, sum(self._tree.held_bytes().values())
        )

    def report(self) -> dict[str, Any]:
        """The tree's size and totals since the start, for operators."""
        use = self._tree.use
        return {
            "nodes": len(self._tree),
            "block_tokens": self._tree.block_tokens,
            "held_bytes": dict(self._tree.held_bytes()),
            "evicted_bytes": use.evicted_bytes,
            "saved_ms": use.saved_ms,
            "computed_again_ms": use.ghost_ms,
        }

    def forget(self, pages: Mapping[str, Sequence[int]]) -> int:
        """Pages that the tree let go; answers their bytes."""
        freed = 0
        for name, ids in pages.items():
            group = self._book.number[name]
            if self._spill is not None:
                for page in ids:
                    self._spill.forget(group, page)
            self._book.forget(group, ids)
            freed += len(ids) * self._book.pools[group].page_bytes
        return freed

    def _insert(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str,
        offer: dict[str, tuple[int, tuple[int, ...]]],
        digests: Sequence[bytes],
        rolling: bool = False,
    ) -> Inserted:
        inserted = self._tree.insert(token_ids, num_tokens, salt, offer, digests)
        for name, ids in inserted.kept.items():
            self._book.keep(self._book.number[name], ids)
        if self._spill is not None:
            self._spill.kept(digests, offer, inserted.kept, rolling)
        return inserted

    def _offer(self, holding: Holding) -> dict[str, tuple[int, tuple[int, ...]]]:
        runs: list[Run] = holding.runs
        return {self._name(group): (run.first, tuple(run.pages)) for group, run in enumerate(runs)}

    def _name(self, group: int) -> str:
        return self._book.pools[group].spec.name
