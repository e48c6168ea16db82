"""Which computed pages are kept for later requests: a tree over token blocks whose checkpoints bundle every kind.

    tokens    |--block--|--block--|--block--|--block--|--block--|
    FULL         pages     pages     pages     pages     pages        one node per block, keyed by a chained hash
    WINDOW                           [visible]           [visible]    } a bundle: what the next token needs besides
    STATE                                 S                   S       } FULL; kept and evicted as one

Models with STATE or WINDOW match only where a bundle is. The tree holds virtual page ids that it was given and never
allocates: it answers which ids it took, already had, or let go, and the ledger counts references. Model and salt enter
the hash of every block, so equal hashes mean equal content, in another process too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memory.api import LedgerError
from memory.ledger.prefix_audit import audit_holdings, audit_order, audit_shape
from memory.ledger.prefix_blocks import Blocks, GroupRule, Offer, first_visible_page
from memory.ledger.prefix_holdings import Holdings
from memory.ledger.prefix_nodes import Bundle, EvictionOrder, Node, TreeUse
from memory.ledger.prices import GreedyDual, RecomputeCost

__all__ = [
    "NO_NODE",
    "Evicted",
    "GroupRule",
    "Inserted",
    "PrefixTree",
    "TreeMatch",
    "TreeUse",
    "first_visible_page",
]

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class TreeMatch:
    """The longest prefix that every kind has: ``pages[group][i]`` is the page of logical page ``first[group] + i``.

    The page of a STATE group is to be copied before it is written: the tree keeps the original.
    """

    num_tokens: int = 0
    node: int = NO_NODE
    pages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    first: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inserted:
    """``node`` ends what the tree now has of the offer (NO_NODE: declined). ``kept``: ids that the tree holds and did
    not before. ``duplicate``: ids not taken because the tree has the same content under other ids."""

    node: int = NO_NODE
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    duplicate: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evicted:
    """Ids that the tree no longer holds, by group."""

    pages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class PrefixTree:
    """See the module. Matching and inserting cost O(blocks of the sequence), evicting O(log n) per unit.

    Args:
        groups: rule by group name; EXPERT groups are left out of account.
        model: enters every hash.
        cost: prices what a use saves.
    """

    def __init__(
        self, groups: Mapping[str, GroupRule], model: str = "", cost: RecomputeCost | None = None
    ) -> None:
        self.blocks = self._blocks = Blocks(groups, model)
        self.cost = cost or RecomputeCost()
        self._order = EvictionOrder(self._blocks, self.cost)
        self._nodes: dict[int, Node] = {}
        self._by_digest: dict[bytes, Node] = {}
        self._holdings = Holdings(self._blocks)
        self._num_locked = 0
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def block_tokens(self) -> int:
        """Matches, bundles and nodes end at multiples of this."""
        return self._blocks.tokens

    @property
    def use(self) -> TreeUse:
        """Totals since the start, for the market."""
        return self._order.use

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of the pages that the tree holds, those shared with requests included."""
        return self._holdings.held_bytes()

    def holds(self, group: str, page: int) -> bool:
        """Whether the tree holds this virtual page."""
        return page in self._holdings.held[group]

    def match(self, token_ids: Sequence[int], salt: str = "", limit: int | None = None) -> TreeMatch:
        """Longest prefix of ``token_ids[:limit]`` that every kind has. Changes nothing: a use is counted by
        :meth:`lock`. Tokens that must be computed anyway are left out by the caller, through ``limit``."""
        end = len(token_ids) if limit is None else min(limit, len(token_ids))
        best: Node | None = None
        for digest in self._blocks.digests(token_ids, end, salt):
            node = self._by_digest.get(digest)
            if node is None:
                break
            if self._order.is_useful(node):
                best = node
        return self._answer(best) if best else TreeMatch()

    def at(self, node: int) -> TreeMatch:
        """What a match that ended at ``node`` brings now; an empty match if the node or its bundle is gone."""
        found = self._nodes.get(node)
        return self._answer(found) if found and self._order.is_useful(found) else TreeMatch()

    def digest(self, node: int) -> bytes:
        """The node's content hash: of model, salt and all tokens up to its end."""
        return self._get(node).digest

    def lock(self, node: int, *, bundle: bool = True) -> None:
        """Keeps the FULL pages on the path to ``node`` from eviction, and its bundle unless ``bundle`` is False.

        With ``bundle`` it is a *use*: a request goes on from here, and the price rises. Without, a request only shares
        its own pages with the tree, and the bundle it left there may be evicted. Locks nest; a use is turned into a
        mere hold, once its state is copied, by ``lock(node, bundle=False)`` and ``unlock(node)``.
        """
        found = self._get(node)
        found.locks += 1
        if found.locks + found.locks_below == 1:
            self._change_path(found, +1)
        if bundle:
            if found.bundle is not None:
                self._lock_bundle(found.bundle, +1)
            self._order.count_use(found)
        self._order.update(found)

    def unlock(self, node: int, *, bundle: bool = True) -> None:
        """Ends one lock that was taken with the same ``bundle``. LedgerError if there is none."""
        found = self._get(node)
        if found.locks == 0:
            raise LedgerError(f"prefix tree: unlock of node {node}, which holds no lock")
        found.locks -= 1
        if bundle and found.bundle is not None:
            if found.bundle.locks == 0:
                raise LedgerError(f"prefix tree: unlock of the bundle at node {node}, which holds no lock")
            self._lock_bundle(found.bundle, -1)
        if not found.locked:
            self._change_path(found, -1)
        self._order.update(found)
        if not self._blocks.full and found.is_free_leaf and not self._order.is_useful(found):
            self._remove_branch(found, {})  # holds no page, so no eviction would ever find it

    def holds_bundle(self, digest: bytes) -> bool:
        """Whether the tree has a checkpoint of this content."""
        node = self._by_digest.get(digest)
        return node is not None and node.bundle is not None

    def supersede(self, node: int, by: int) -> Evicted:
        """The bundle at ``node`` is let go for the one further on at ``by``, unless it was used or is in use."""
        old, new = self._nodes.get(node), self._nodes.get(by)
        if old is None or new is None or new is old or new.bundle is None:
            return Evicted()
        if old.hits or not old.has_free_bundle:
            return Evicted()
        assert old.bundle is not None
        gone: dict[str, list[int]] = {name: [] for name in self._blocks.rules}
        for name, ids in old.bundle.pages.items():
            self._holdings.let_go(name, ids, gone[name])
        if new.bundle.base_tokens == old.num_tokens:
            new.bundle.base_tokens = old.bundle.base_tokens
            self._order.update(new)
        old.bundle = None
        self._order.update(old)
        return Evicted(_frozen(gone))

    def insert(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str,
        pages: Offer,
        digests: Sequence[bytes] = (),
    ) -> Inserted:
        """Offers computed pages: ``pages[group] = (first logical page, ids)``; ``digests`` of all their blocks spare
        hashing ``token_ids`` again.

        A model with FULL only keeps every whole block that the offer reaches. With STATE or WINDOW ``num_tokens`` must
        be a multiple of :attr:`block_tokens`, the STATE page must hold the state exactly there (from then on nobody may
        write it) and the WINDOW pages that the next token sees must be given; else the offer is declined. Raises
        LedgerError where an id is offered that the tree holds for other content.
        """
        end = num_tokens - num_tokens % self._blocks.tokens
        bundle_pages = self._blocks.bundle_pages(end, pages)
        if (
            end == 0
            or end > len(token_ids)
            or bundle_pages is None
            or (self._blocks.bundled and end != num_tokens)
        ):
            return Inserted()
        digests = digests or list(self._blocks.digests(token_ids, end, salt))
        known = self._known(digests)
        covered = self._blocks.num_covered(len(known), len(digests), pages)
        if covered == 0 or (self._blocks.bundled and covered < len(digests)):
            return Inserted()
        kept: dict[str, list[int]] = {name: [] for name in self._blocks.rules}
        duplicate: dict[str, list[int]] = {name: [] for name in self._blocks.rules}
        for index, node in enumerate(known):
            for name, offered, mine in zip(
                self._blocks.full, self._blocks.block_pages(index, pages), node.full, strict=True
            ):
                duplicate[name] += set(offered).difference(mine)
        tail = known[-1] if known else None
        for index in range(len(known), covered):
            tail = self._append(tail, digests[index], self._blocks.block_pages(index, pages), kept)
        assert tail is not None
        if self._blocks.bundled:
            self._attach_bundle(tail, bundle_pages, kept, duplicate)
        if known:
            self._order.update(known[-1])
        self._order.update(tail)
        return Inserted(tail.number, _frozen(kept), _frozen(duplicate))

    def evictable_bytes(self) -> Mapping[str, int]:
        """Bytes by group that :meth:`evict` could let go. A page that a request still shares without holding a lock
        is among them: the ledger knows who else holds it."""
        num_free = len(self._nodes) - self._num_locked
        found = {
            name: num_free * count * self._blocks.rules[name].page_bytes
            for name, count in zip(self._blocks.full, self._blocks.full_pages, strict=True)
        }
        return found | self._holdings.evictable_bytes()

    def evict(self, need: Mapping[str, int]) -> Evicted:
        """Lets the cheapest unlocked pages go until ``need[group]`` bytes of every group are, or none are left.

        A bundle goes as one, and at the end of a branch the blocks that led only to it go with it.
        """
        gone: dict[str, list[int]] = {name: [] for name in self._blocks.rules}
        queues = ((self._order.leaves, self._blocks.full), (self._order.bundles, self._blocks.bundled))
        for queue, names in queues:
            wanted = {name: need.get(name, 0) for name in names}
            while any(len(gone[n]) * self._blocks.rules[n].page_bytes < wanted[n] for n in names):
                if not self._evict_head(queue, gone):
                    break
        return Evicted(_frozen(gone))

    def evict_cheapest(self, num_bytes: int, below: float = float("inf")) -> Evicted:
        """For the market: lets the cheapest of all kinds go, while worth less than ``below`` milliseconds per byte,
        until ``num_bytes`` are free in sum."""
        gone: dict[str, list[int]] = {name: [] for name in self._blocks.rules}
        limit = self._order.clock + below
        while sum(self._blocks.rules[name].page_bytes * len(ids) for name, ids in gone.items()) < num_bytes:
            queue = self._cheapest_queue()
            head = queue.cheapest()
            if head is None or head[1] >= limit:
                break
            self._evict_head(queue, gone)
        return Evicted(_frozen(gone))

    def cheapest_worth(self) -> float | None:
        """Milliseconds per byte that the cheapest unit is still worth; None if nothing can be evicted."""
        head = self._cheapest_queue().cheapest()
        return max(0.0, head[1] - self._order.clock) if head else None

    def audit(self) -> None:
        """Computes every count anew from the nodes; LedgerError on any difference."""
        audit_shape(self._nodes, self._by_digest)
        audit_holdings(self._nodes, self._blocks, self._holdings, self._num_locked)
        audit_order(self._nodes, self._blocks, self._order)

    def _answer(self, node: Node) -> TreeMatch:
        path: list[Node] = []
        step: Node | None = node
        while step is not None:
            path.append(step)
            step = step.parent
        path.reverse()
        pages = {
            name: tuple(page for step in path for page in step.full[index])
            for index, name in enumerate(self._blocks.full)
        }
        first = dict.fromkeys(self._blocks.full, 0)
        if node.bundle is not None:
            pages |= node.bundle.pages
            first |= {
                name: self._blocks.bundle_span(name, node.num_tokens)[0] for name in self._blocks.bundled
            }
        return TreeMatch(node.num_tokens, node.number, pages, first)

    def _change_path(self, node: Node, change: int) -> None:
        """``node`` has just become locked (+1) or free (-1): tells the nodes above, as far up as that changes them."""
        step: Node | None = node
        while step is not None:
            self._num_locked += change
            self._order.update(step)
            step = step.parent
            if step is None:
                return
            was_locked = step.locked
            step.locks_below += change
            if step.locked == was_locked:
                return

    def _lock_bundle(self, bundle: Bundle, change: int) -> None:
        was_locked = bundle.locks > 0
        bundle.locks += change
        if (bundle.locks > 0) != was_locked:
            self._holdings.lock(bundle.pages, change)

    def _known(self, digests: Sequence[bytes]) -> list[Node]:
        known = []
        for digest in digests:
            node = self._by_digest.get(digest)
            if node is None:
                break
            known.append(node)
        return known

    def _append(
        self,
        parent: Node | None,
        digest: bytes,
        full: tuple[tuple[int, ...], ...],
        kept: dict[str, list[int]],
    ) -> Node:
        num_tokens = self._blocks.tokens + (parent.num_tokens if parent else 0)
        node = Node(self._next_number, digest, parent, num_tokens, full)
        self._next_number += 1
        self._nodes[node.number] = node
        self._by_digest[digest] = node
        if parent is not None:
            parent.num_children += 1
        for name, ids in zip(self._blocks.full, full, strict=True):
            kept[name] += self._holdings.hold(name, ids)
        if not self._blocks.bundled:
            self._order.came_back(node)
        return node

    def _attach_bundle(
        self,
        node: Node,
        offered: dict[str, tuple[int, ...]],
        kept: dict[str, list[int]],
        other: dict[str, list[int]],
    ) -> None:
        if node.bundle is not None:
            for name, mine in node.bundle.pages.items():
                other[name] += set(offered[name]).difference(mine)
            return
        for name, ids in offered.items():
            kept[name] += self._holdings.hold(name, ids)
        base = node.parent
        while base is not None and base.bundle is None:
            base = base.parent
        node.bundle = Bundle(offered, base.num_tokens if base else 0)
        node.hits = 0
        self._order.came_back(node)

    def _cheapest_queue(self) -> GreedyDual:
        leaf, bundle = self._order.leaves.cheapest(), self._order.bundles.cheapest()
        first = leaf is not None and (bundle is None or leaf[1] <= bundle[1])
        return self._order.leaves if first else self._order.bundles

    def _evict_head(self, queue: GreedyDual, gone: dict[str, list[int]]) -> bool:
        head = queue.cheapest()
        if head is None:
            return False
        self._order.paid(head[1])
        node = self._nodes[head[0]]
        if node.has_free_bundle:
            self._drop_bundle(node, gone)
        if node.is_free_leaf:
            self._remove_branch(node, gone)
        else:
            self._order.update(node)
        return True

    def _drop_bundle(self, node: Node, gone: dict[str, list[int]]) -> None:
        assert node.bundle is not None
        freed = sum(self._holdings.let_go(name, ids, gone[name]) for name, ids in node.bundle.pages.items())
        self._order.lost(node, freed)
        node.bundle = None

    def _remove_branch(self, node: Node, gone: dict[str, list[int]]) -> None:
        """Removes a leaf, and above it the blocks at which no match can end any more."""
        step: Node | None = node
        while step is not None:
            freed = sum(
                self._holdings.let_go(name, ids, gone[name])
                for name, ids in zip(self._blocks.full, step.full, strict=True)
            )
            if not self._blocks.bundled:
                self._order.lost(step, freed)
            del self._nodes[step.number], self._by_digest[step.digest]
            self._order.forget(step)
            step = step.parent
            if step is None:
                return
            step.num_children -= 1
            if not step.is_free_leaf or self._order.is_useful(step):
                self._order.update(step)
                return

    def _get(self, node: int) -> Node:
        found = self._nodes.get(node)
        if found is None:
            raise LedgerError(f"prefix tree: no node {node}")
        return found


def _frozen(pages: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(ids) for name, ids in pages.items() if ids}
