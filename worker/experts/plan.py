"""Says at start what a worker's arena holds: context and requests at several numbers of resident experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memory.api import PageKind, PageSpec
from memory.ledger.specs import most_pages

TYPICAL_TOKENS = 4096
"""Requests of this length (or the model's context, if that is shorter) are counted."""
_SHARES = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class ArenaFacts:
    """What the plan depends on. ``floor_places``: places that requests' pages never take."""

    arena_bytes: int
    specs: Sequence[PageSpec]
    place_bytes: int
    num_experts: int
    floor_places: int
    fixed_places: bool
    max_model_len: int
    chunk_tokens: int


def floor_places(expert_bytes: int, place_bytes: int, arena_bytes: int, per_step: int) -> int:
    """Places that page bands leave to experts. Fixed by ``expert_bytes``; else what one token uses (``per_step``), but
    no more than a quarter of the arena: the context reserve comes first."""
    if expert_bytes:
        return expert_bytes // place_bytes
    return min(per_step, arena_bytes // 4 // place_bytes)


def request_bytes(specs: Sequence[PageSpec], num_tokens: int, chunk_tokens: int) -> int:
    """Bytes of all pages that a request of ``num_tokens`` comes to hold."""
    return sum(
        most_pages(spec, num_tokens, chunk_tokens) * spec.page_bytes
        for spec in specs
        if spec.kind is not PageKind.EXPERT
    )


def _longest(facts: ArenaFacts, left_bytes: int) -> int:
    """The longest request, in tokens, that fits ``left_bytes``."""
    low, high = 0, facts.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if request_bytes(facts.specs, middle, facts.chunk_tokens) <= left_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def plan_lines(facts: ArenaFacts) -> Iterator[str]:
    """The plan in words, a line per number of places."""
    every = facts.num_experts
    kind = "fixed" if facts.fixed_places else "what requests leave, at least the floor"
    yield (
        f"experts: {every} of {facts.place_bytes} bytes; arena {facts.arena_bytes / 1e6:.1f} MB;"
        f" places: {kind}; floor {facts.floor_places}"
    )
    counts = {min(int(share * every), facts.arena_bytes // facts.place_bytes) for share in _SHARES}
    wanted = {facts.floor_places} if facts.fixed_places else counts | {facts.floor_places}
    typical = min(TYPICAL_TOKENS, facts.max_model_len)
    each = request_bytes(facts.specs, typical, facts.chunk_tokens)
    for places in sorted(wanted, reverse=True):
        left = facts.arena_bytes - places * facts.place_bytes
        yield (
            f"experts: {places} resident ({places / every:.0%}): {max(left, 0) / 1e6:.1f} MB for requests:"
            f" one of {_longest(facts, left)} tokens, or {max(left, 0) // each} of {typical}"
        )


def store_plan(num_bytes: int, pinnable_bytes: int, reason: str, on_gpu: bool) -> tuple[bool, str]:
    """Whether a host store of ``num_bytes`` can be held here, and a sentence: a GPU reads missing experts in place, so
    for it every block must be pinned; a CPU needs the memory only."""
    size, limit = f"{num_bytes / 1e9:.2f} GB", f"{pinnable_bytes / 1e9:.2f} GB ({reason})"
    if num_bytes <= pinnable_bytes:
        how = "fully pinned" if on_gpu else "not pinned: the device is the CPU"
        return True, f"host store: {size}, {how}; at most {limit}"
    need = "pin" if on_gpu else "hold"
    return False, (
        f"the experts need {size} of host memory, but this machine can {need} {limit}; a smaller weight format, or"
        " host_store=shared for several replicas, needs less"
    )
