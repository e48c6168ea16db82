"""Small geometries of every shape of model, for tests: pages of a few hundred bytes, all kinds mixed."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import PageKind, PageSpec, Row
from memory.ledger.host_tier import HostTier
from memory.ledger.ledger import ArenaLedger
from memory.ledger.prefix_tree import GroupRule, PrefixTree
from memory.ledger.specs import attention_spec, latent_spec, state_spec

KINDS = ("full", "state", "window", "window2")


def full_spec(page_tokens: int) -> PageSpec:
    """One layer of tiny FULL attention."""
    return attention_spec("full", [0], 1, 4, "float16", page_tokens)


def window_spec(page_tokens: int, window: int, name: str = "window") -> PageSpec:
    """One layer of tiny WINDOW attention."""
    return attention_spec(name, [1], 1, 4, "float16", page_tokens, window=window)


def small_state_spec(num_bytes: int = 768) -> PageSpec:
    """A state of two parts of different dtypes, ``num_bytes`` and 128 bytes of convolution."""
    return state_spec("state", [2], [Row("s", (num_bytes // 4,), "float32"), Row("conv", (64,), "bfloat16")])


def mixed_specs(num_kinds: int, page_tokens: int, window: int, state_bytes: int = 768) -> list[PageSpec]:
    """The first ``num_kinds`` of FULL, STATE, WINDOW and a second WINDOW of another page size."""
    other = max(1, page_tokens // 4)
    specs = [
        full_spec(page_tokens),
        small_state_spec(state_bytes),
        window_spec(page_tokens, window),
        window_spec(other, 2 * window + 3, "window2"),
    ]
    return specs[:num_kinds]


def latent_specs(page_tokens: int) -> list[PageSpec]:
    """MLA with index keys beside a state, as hybrid latent models have them."""
    latent = latent_spec("full", [0, 3], 24, "bfloat16", page_tokens, index_dim=8, index_scale=True)
    return [latent, small_state_spec()]


def tree_for(specs: Sequence[PageSpec]) -> PrefixTree:
    """A prefix tree over the groups of ``specs``."""
    return PrefixTree(
        {
            s.name: GroupRule(s.kind, s.page_tokens, s.page_bytes, s.window)
            for s in specs
            if s.kind is not PageKind.EXPERT
        }
    )


def small_ledger(
    specs: Sequence[PageSpec],
    arena_bytes: int,
    *,
    place_bytes: int = 0,
    floor_places: int = 0,
    cached: bool = False,
    mode: str = "arena",
    move_budget_bytes: int = 8192,
    urgent_budget_bytes: int = 2 << 30,
    chunk: int = 64,
    host_bytes: int = 0,
    host_budget_bytes: int = 1 << 30,
) -> ArenaLedger:
    """An ArenaLedger of plain numbers."""
    return ArenaLedger(
        specs,
        arena_bytes,
        expert_place_bytes=place_bytes,
        floor_places=floor_places,
        mode=mode,
        move_budget_bytes=move_budget_bytes,
        urgent_budget_bytes=urgent_budget_bytes,
        max_chunk_tokens=chunk,
        prefix_tree=tree_for(specs) if cached else None,
        host_tier=HostTier(host_bytes, {spec.name: spec.page_bytes for spec in specs})
        if host_bytes
        else None,
        host_budget_bytes=host_budget_bytes,
    )
