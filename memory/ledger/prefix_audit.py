"""Proves a prefix tree sound: counts, locks, holdings and queues are computed anew from its nodes and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from memory.api import LedgerError
from memory.ledger.prefix_blocks import Blocks
from memory.ledger.prefix_holdings import Holdings
from memory.ledger.prefix_nodes import EvictionOrder, Node


def audit_holdings(nodes: Mapping[int, Node], blocks: Blocks, holdings: Holdings, num_locked: int) -> None:
    """``num_locked``: locked nodes as counted by the tree. Raises LedgerError on any difference."""
    found: dict[str, Counter[int]] = {name: Counter() for name in blocks.rules}
    found_locked: dict[str, Counter[int]] = {name: Counter() for name in blocks.bundled}
    for node in nodes.values():
        for name, ids in zip(blocks.full, node.full, strict=True):
            found[name].update(ids)
        if node.bundle is None:
            continue
        for name, ids in node.bundle.pages.items():
            found[name].update(ids)
            if node.bundle.locks:
                found_locked[name].update(ids)
    _expect(found == holdings.held, "pages held differ from the nodes' pages")
    _expect(found_locked == holdings.locked, "locked pages differ from the locked bundles' pages")
    _expect(num_locked == sum(node.locked for node in nodes.values()), "locked nodes miscounted")
    for name in blocks.full:
        _expect(all(count == 1 for count in found[name].values()), f"a {name} page in two nodes")


def audit_shape(nodes: Mapping[int, Node], by_digest: Mapping[bytes, Node]) -> None:
    """Parents, child counts, lock counts and the hash table. Raises LedgerError on any difference."""
    children: Counter[int] = Counter()
    below: Counter[int] = Counter()
    for node in nodes.values():
        if node.parent is not None:
            _expect(nodes.get(node.parent.number) is node.parent, f"node {node.number} has lost its parent")
            children[node.parent.number] += 1
            below[node.parent.number] += node.locked
    for number, node in nodes.items():
        _expect(node.num_children == children[number], f"node {number}: children miscounted")
        _expect(node.locks_below == below[number], f"node {number}: locks below miscounted")
        _expect(node.bundle is None or node.bundle.locks <= node.locks, f"node {number}: bundle locked alone")
        _expect(by_digest.get(node.digest) is node, f"node {number} is not under its hash")
    _expect(len(by_digest) == len(nodes), "hashes without a node")


def audit_order(nodes: Mapping[int, Node], blocks: Blocks, order: EvictionOrder) -> None:
    """Exactly what can go is queued, at its present price. Raises LedgerError on any difference."""
    for number, node in nodes.items():
        leaf = node.is_free_leaf and bool(blocks.full)
        _expect((number in order.leaves) == leaf, f"node {number}: wrongly (not) queued as a leaf")
        _expect(
            (number in order.bundles) == node.has_free_bundle, f"node {number}: bundle wrongly (not) queued"
        )
        if leaf:
            price = order.price(node) if order.is_useful(node) else 0.0
            _expect(order.leaves.priority(number) == price, f"node {number}: leaf at a stale price")
        if node.has_free_bundle:
            _expect(
                order.bundles.priority(number) == order.price(node), f"node {number}: bundle at a stale price"
            )
    _expect(
        len(order.leaves) <= len(nodes) and len(order.bundles) <= len(nodes), "queued nodes that are gone"
    )


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise LedgerError(f"prefix tree: {what}")
