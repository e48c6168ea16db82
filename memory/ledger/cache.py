"""Joins the prefix tree to the page book: what the tree takes, shares and lets go becomes holds on virtual pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from memory.api import NO_MATCH, PageKind, PrefixMatch
from memory.ledger.book import PageBook
from memory.ledger.holding import NO_NODE, Holding, Run
from memory.ledger.prefix_tree import PrefixTree, TreeMatch


class RoomFor(Protocol):
    """Makes room for pages by group number, evicting where needed; False if there is none."""

    def __call__(self, need: Mapping[int, int]) -> bool: ...


class PrefixCache:
    """The prefix tree over the pages of a book."""

    def __init__(self, book: PageBook, tree: PrefixTree) -> None:
        self._book = book
        self._tree = tree
        self._states = [g for g, pool in enumerate(book.pools) if pool.spec.kind is PageKind.STATE]
        self._bundled = any(pool.spec.kind is not PageKind.FULL for pool in book.pools)
        self._uses: list[int] = []  # nodes whose bundles are locked until the step's copies are handed out

    @property
    def tree(self) -> PrefixTree:
        """The tree."""
        return self._tree

    # -- reading -------------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], salt: str) -> PrefixMatch:
        """The longest cached prefix that leaves at least one token to compute."""
        found = self._tree.match(token_ids, salt, len(token_ids) - 1)
        return PrefixMatch(found.num_tokens, 0, found.node) if found.num_tokens else NO_MATCH

    def at(self, match: PrefixMatch) -> TreeMatch | None:
        """What a match brings now; None if it was evicted since."""
        found = self._tree.at(match.node)
        return found if found.num_tokens == match.num_tokens else None

    def lock(self, node: int) -> None:
        """Keeps a match from eviction, its bundle included, while room is made for its request."""
        self._tree.lock(node)

    def unlock(self, node: int) -> None:
        """Ends :meth:`lock`."""
        self._tree.unlock(node)

    def share(self, holding: Holding, found: TreeMatch) -> None:
        """Gives a request the pages of a match that is locked; that lock ends with :meth:`end_uses`.

        States are not shared: the request's own page, already in its run, takes a copy ahead of the step.
        """
        book = self._book
        for group, pool in enumerate(book.pools):
            name = pool.spec.name
            if group in self._states:
                book.tables[group].hold(holding.runs[group].pages[0])
                book.copy(group, found.pages[name][0], holding.runs[group].pages[0])
                continue
            for page in found.pages[name]:
                book.tables[group].hold(page)
        self._tree.lock(found.node, bundle=False)
        holding.node = found.node
        self._uses.append(found.node)

    def end_uses(self) -> None:
        """The step's copies are handed out: bundles that were only read from may be evicted again."""
        for node in self._uses:
            self._tree.unlock(node)
        self._uses.clear()

    # -- keeping -------------------------------------------------------------------------------------------------

    def checkpoint(
        self, holding: Holding, token_ids: Sequence[int], num_tokens: int, salt: str, room_for: RoomFor
    ) -> bool:
        """Offers a running request's pages up to ``num_tokens``; its states are copied ahead of the next step."""
        if self._bundled and num_tokens % self._tree.block_tokens:
            return False
        if self._states:
            if self._tree.match(token_ids, salt, num_tokens).num_tokens == num_tokens:
                return True
            if not room_for(dict.fromkeys(self._states, 1)):
                return False
        offer = self._offer(holding)
        copies = {}
        for group in self._states:
            copies[group] = self._book.new_page(group)
            offer[self._name(group)] = (0, (copies[group],))
        inserted = self._tree.insert(token_ids, num_tokens, salt, offer)
        taken = inserted.node != NO_NODE and self._keep(inserted.kept)
        for group, page in copies.items():
            if page in inserted.kept.get(self._name(group), ()):
                self._book.copy(group, holding.runs[group].pages[0], page)
            else:
                self._book.drop(group, page)
        if taken and not any(inserted.duplicate.get(self._name(g)) for g in self._fulls()):
            self._tree.lock(inserted.node, bundle=False)
            self.leave(holding)
            holding.node = inserted.node
        return taken

    def donate(self, holding: Holding, token_ids: Sequence[int], num_computed_tokens: int, salt: str) -> None:
        """Offers the pages of a request that ends. A state goes with them only if it is exactly at a checkpoint."""
        end = min(num_computed_tokens, len(token_ids))
        if not self._states:
            end -= end % self._tree.block_tokens
        if end:
            self._keep(self._tree.insert(token_ids, end, salt, self._offer(holding)).kept)

    def leave(self, holding: Holding) -> None:
        """The request no longer needs its node."""
        if holding.node != NO_NODE:
            self._tree.unlock(holding.node, bundle=False)
            holding.node = NO_NODE

    def evict(self, need: Mapping[int, int]) -> int:
        """Lets cached pages go until ``need`` bytes by group number are; answers the bytes let go."""
        evicted = self._tree.evict({self._name(group): num_bytes for group, num_bytes in need.items()})
        return self.forget(evicted.pages)

    def forget(self, pages: Mapping[str, Sequence[int]]) -> int:
        """Pages that the tree let go; answers their bytes."""
        freed = 0
        for name, ids in pages.items():
            group = self._book.number[name]
            self._book.forget(group, ids)
            freed += len(ids) * self._book.pools[group].page_bytes
        return freed

    def _keep(self, kept: Mapping[str, Sequence[int]]) -> bool:
        for name, ids in kept.items():
            self._book.keep(self._book.number[name], ids)
        return True

    def _offer(self, holding: Holding) -> dict[str, tuple[int, tuple[int, ...]]]:
        runs: list[Run] = holding.runs
        return {self._name(group): (run.first, tuple(run.pages)) for group, run in enumerate(runs)}

    def _fulls(self) -> list[int]:
        return [g for g, pool in enumerate(self._book.pools) if pool.spec.kind is PageKind.FULL]

    def _name(self, group: int) -> str:
        return self._book.pools[group].spec.name
