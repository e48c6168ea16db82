"""The prefix tree's nodes, and the order in which they are let go: cheapest first, by a price that ages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from memory.ledger.prefix_blocks import Blocks
from memory.ledger.prices import GreedyDual, RecomputeCost

MAX_HITS = 64
"""Uses beyond this add nothing to a price, so that the past's favourite cannot outlive all ageing."""
NUM_GHOSTS = 16_384
"""How many evicted units are remembered by hash, to see what more memory would have saved."""


@dataclass(frozen=True, slots=True)
class TreeUse:
    """Running totals for the market. ``saved_ms``: work that uses of the tree spared; ``ghost_ms``: work done again
    for what had been evicted; ``evicted_bytes``: bytes let go for want of room."""

    saved_ms: float = 0.0
    ghost_ms: float = 0.0
    evicted_bytes: int = 0


class Bundle:
    """What the token behind a checkpoint needs besides FULL pages; kept and evicted as one."""

    __slots__ = ("base_tokens", "locks", "pages")

    def __init__(self, pages: dict[str, tuple[int, ...]], base_tokens: int) -> None:
        self.pages = pages
        self.base_tokens = base_tokens  # the bundle before: from there on a match here saves work
        self.locks = 0


class Node:
    """One block of tokens behind ``parent``'s; ``full`` has its FULL pages, group by group."""

    __slots__ = (
        "bundle", "digest", "full", "hits", "locks", "locks_below", "num_children", "num_tokens", "number", "parent",
        "stamp",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        digest: bytes,
        parent: Node | None,
        num_tokens: int,
        full: tuple[tuple[int, ...], ...],
    ) -> None:
        self.number = number
        self.digest = digest
        self.parent = parent
        self.num_tokens = num_tokens
        self.full = full
        self.bundle: Bundle | None = None
        self.num_children = 0
        self.locks = 0
        self.locks_below = 0  # children that hold a lock, themselves or further down
        self.hits = 0
        self.stamp = 0.0

    @property
    def locked(self) -> bool:
        """Whether a request's path of pages runs through this node."""
        return self.locks + self.locks_below > 0

    @property
    def is_free_leaf(self) -> bool:
        """Whether the node can leave the tree now."""
        return self.num_children == 0 and not self.locked

    @property
    def has_free_bundle(self) -> bool:
        """Whether the bundle can be let go now."""
        return self.bundle is not None and self.bundle.locks == 0


class EvictionOrder:
    """Two queues under one clock: ``leaves`` (letting one go frees FULL pages, and its bundle) and ``bundles``.

    The clock is GreedyDual's: the highest price paid so far. A node's price is the clock at its last use plus uses x
    milliseconds saved / bytes held for it.
    """

    def __init__(self, blocks: Blocks, cost: RecomputeCost) -> None:
        self.leaves = GreedyDual()
        self.bundles = GreedyDual()
        self.clock = 0.0
        self._blocks = blocks
        self._cost = cost
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()
        self._saved_ms = 0.0
        self._ghost_ms = 0.0
        self._evicted_bytes = 0

    @property
    def use(self) -> TreeUse:
        """Totals since the start."""
        return TreeUse(self._saved_ms, self._ghost_ms, self._evicted_bytes)

    def is_useful(self, node: Node) -> bool:
        """Whether a match can end here."""
        return node.bundle is not None or not self._blocks.bundled

    def update(self, node: Node) -> None:
        """Puts the node into the queues it belongs in, at its present price."""
        leaf = node.is_free_leaf
        if leaf and self._blocks.full:
            # A leaf that nothing can match is of no use to anybody: it goes first.
            self.leaves.put(node.number, self.price(node) if self.is_useful(node) else 0.0)
        else:
            self.leaves.discard(node.number)
        if node.has_free_bundle:
            self.bundles.put(node.number, self.price(node))
        else:
            self.bundles.discard(node.number)

    def forget(self, node: Node) -> None:
        """Takes a removed node out of both queues."""
        self.leaves.discard(node.number)
        self.bundles.discard(node.number)

    def price(self, node: Node) -> float:
        """The node's priority now: of the whole branch end where it is a leaf, else of its bundle alone."""
        num_bytes = 0
        if node.bundle is not None:
            base = node.bundle.base_tokens
            num_bytes = sum(
                len(ids) * self._blocks.rules[name].page_bytes for name, ids in node.bundle.pages.items()
            )
        else:
            base = node.num_tokens - self._blocks.tokens
        if node.is_free_leaf:
            num_bytes += (node.num_tokens - base) // self._blocks.tokens * self._blocks.full_bytes
        return node.stamp + (1 + node.hits) * self._cost.span_ms(base, node.num_tokens) / max(1, num_bytes)

    def count_use(self, node: Node) -> None:
        """A request goes on from ``node``."""
        self._saved_ms += self._cost.span_ms(0, node.num_tokens)
        step: Node | None = node
        while step is not None:
            step.hits = min(step.hits + 1, MAX_HITS)
            step.stamp = self.clock
            # With bundles, the blocks between them have no price of their own: only where the match ended counts.
            step = None if self._blocks.bundled else step.parent

    def paid(self, priority: float) -> None:
        """Something of this price was let go: the clock moves up to it."""
        self.clock = max(self.clock, priority)

    def lost(self, node: Node, num_bytes: int) -> None:
        """Remembers by its hash what can be matched no more, so that computing it again is noticed."""
        base = node.bundle.base_tokens if node.bundle is not None else node.num_tokens - self._blocks.tokens
        self._ghosts[node.digest] = self._cost.span_ms(base, node.num_tokens)
        self._evicted_bytes += num_bytes
        if len(self._ghosts) > NUM_GHOSTS:
            self._ghosts.popitem(last=False)

    def came_back(self, node: Node) -> None:
        """The node can be matched (again): if it was evicted before, that eviction cost what it had saved."""
        node.stamp = self.clock
        self._ghost_ms += self._ghosts.pop(node.digest, 0.0)
