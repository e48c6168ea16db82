"""Chooses the ledger: the one place where a worker's configuration meets the book of pages."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import PageKind, PageSpec
from memory.ledger.host_tier import HostTier
from memory.ledger.ledger import ArenaLedger
from memory.ledger.prefix_tree import GroupRule, PrefixTree
from worker.config import WorkerConfig
from worker.errors import ConfigError


def make_ledger(
    config: WorkerConfig,
    specs: Sequence[PageSpec],
    arena_bytes: int,
    floor_places: int = 0,
    chunk_tokens: int = 0,
) -> ArenaLedger:
    """The ledger of one worker over ``arena_bytes`` bytes: one arena, or fixed shares with ``memory_mode=split``.
    ``floor_places``: expert places that requests' pages never take. ``chunk_tokens``: most tokens of one request
    computed at once, where that is more than a step's. ConfigError for a host tier that holds no page."""
    tree = host_tier = None
    if config.prefix_cache:
        rules = {s.name: GroupRule(s.kind, s.page_tokens, s.page_bytes, s.window) for s in specs}
        tree = PrefixTree(rules, model=config.model)
        if config.host_tier_bytes:
            kept = {s.name: s.page_bytes for s in specs if s.kind is not PageKind.EXPERT}
            host_tier = HostTier(config.host_tier_bytes, kept)
            if not host_tier.budget_bytes:
                largest = max(kept, key=lambda name: kept[name])
                raise ConfigError(
                    [
                        f"host_tier_bytes={config.host_tier_bytes} does not hold one page: those of {largest!r} take"
                        f" {kept[largest]} bytes; give more, or 0 for no host tier"
                    ]
                )
    return ArenaLedger(
        specs,
        arena_bytes,
        floor_places=floor_places,
        mode=config.memory_mode,
        split_ratio=config.split_ratio,
        max_chunk_tokens=max(config.max_step_tokens, chunk_tokens),
        prefix_tree=tree,
        host_tier=host_tier,
    )
