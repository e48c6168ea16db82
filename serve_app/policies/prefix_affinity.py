"""Which replica likely holds which prefix: chained block hashes of prompts, as a bounded map per replica.

The map is a guess, not a copy of the replicas' prefix trees: it learns from the Router's own placements, forgets the
least recently used blocks, shrinks when a replica reports that it holds less, and forgets all that was used before a
block which a request found gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

DEFAULT_BLOCK_TOKENS = 64


def block_hashes(
    token_ids: Sequence[int], salt: str = "", block_tokens: int = DEFAULT_BLOCK_TOKENS
) -> tuple[int, ...]:
    """Hash of every prefix of ``token_ids`` that ends at a block boundary, shortest first.

    Equal prefixes of equal ``salt`` give equal hashes, in any process. The last token never closes a block: at
    least one token is always left to compute.
    """
    chained = int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little")
    found: list[int] = []
    for end in range(block_tokens, len(token_ids), block_tokens):
        chained = hash((chained, tuple(token_ids[end - block_tokens : end])))
        found.append(chained)
    return tuple(found)


class PrefixAffinity:
    """Prefix blocks by replica.

    Args:
        block_tokens: tokens per block, as given to :func:`block_hashes`.
        max_blocks: bound of each replica's map.
    """

    def __init__(self, block_tokens: int = DEFAULT_BLOCK_TOKENS, max_blocks: int = 65_536) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        # Per replica, oldest first: block -> stamp of its last use. Stamps grow with time.
        self._held: dict[str, OrderedDict[int, int]] = {}
        self._holders: dict[int, set[str]] = {}

    def num_blocks(self, replica_id: str) -> int:
        """Blocks that the replica is believed to hold."""
        return len(self._held.get(replica_id, ()))

    def hit_tokens(self, chain: Sequence[int]) -> dict[str, int]:
        """Tokens of the prompt that each replica likely holds; replicas without a hit are left out."""
        found: dict[str, int] = {}
        alive: set[str] = set()
        nobody: set[str] = set()
        depth = 0
        for depth, block in enumerate(chain, start=1):
            holders = self._holders.get(block, nobody)
            if depth == 1:
                alive = set(holders)
            elif not alive <= holders:
                found.update(dict.fromkeys(alive - holders, (depth - 1) * self.block_tokens))
                alive &= holders
            if not alive:
                break
        found.update(dict.fromkeys(alive, depth * self.block_tokens))
        return found

    def last_use(self, replica_id: str, block: int) -> int:
        """Stamp of a block's last use on a replica; 0 if it is not believed to be there."""
        held = self._held.get(replica_id)
        return held.get(block, 0) if held is not None else 0

    def placed(self, replica_id: str, chain: Sequence[int], stamp: int) -> None:
        """The replica computes this prompt, and will hold its blocks; ``stamp`` is above all earlier ones."""
        held = self._held.setdefault(replica_id, OrderedDict())
        # Deepest first, so that a chain loses its tail before its head: a head alone is still a hit.
        for block in reversed(chain):
            if block not in held:
                self._holders.setdefault(block, set()).add(replica_id)
            held[block] = stamp
            held.move_to_end(block)
        self.resize(replica_id, self._max_blocks)

    def withdraw(self, replica_id: str, chain: Sequence[int], stamp: int) -> None:
        """The placement of ``stamp`` never ran: blocks that only it would have brought are not there."""
        held = self._held.get(replica_id)
        for block in chain if held is not None else ():
            if held is not None and held.get(block) == stamp:
                self._drop(replica_id, held, block)

    def forget_until(self, replica_id: str, stamp: int) -> None:
        """A block last used at ``stamp`` was found gone: with it go all that were used no later."""
        held = self._held.get(replica_id)
        while held and held[block := next(iter(held))] <= stamp:
            self._drop(replica_id, held, block)

    def resize(self, replica_id: str, max_blocks: int) -> None:
        """Forgets the least recently used blocks beyond ``max_blocks``."""
        held = self._held.get(replica_id)
        while held is not None and len(held) > max(0, max_blocks):
            self._drop(replica_id, held, next(iter(held)))

    def flush(self, replica_id: str) -> None:
        """The replica's prefix cache was emptied, or the replica is gone."""
        self.resize(replica_id, 0)
        self._held.pop(replica_id, None)

    def _drop(self, replica_id: str, held: OrderedDict[int, int], block: int) -> None:
        del held[block]
        holders = self._holders[block]
        holders.discard(replica_id)
        if not holders:
            del self._holders[block]
