"""What one request holds: a run of virtual pages per group, and what it lacks for an ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memory.api import PageKind, PageSpec
from memory.ledger.specs import first_visible_page, pages_for

NO_NODE = -1
UNLIMITED_TOKENS = 1 << 62


@dataclass(slots=True)
class Run:
    """Pages of logical numbers ``first``, ``first + 1``, ...; the first ``num_sealed`` logical pages are sealed."""

    first: int = 0
    pages: list[int] = field(default_factory=list)
    num_sealed: int = 0

    @property
    def end(self) -> int:
        """One behind the last logical page."""
        return self.first + len(self.pages)


class Holding:
    """A request's pages, by group number."""

    __slots__ = ("capacity_tokens", "digests", "node", "rolling_node", "runs")

    def __init__(self, num_groups: int) -> None:
        self.runs = [Run() for _ in range(num_groups)]
        self.capacity_tokens = 0
        self.node = NO_NODE
        """The node of the prefix tree that keeps the pages shared with the tree from eviction."""
        self.rolling_node = NO_NODE
        """Where its last rolling checkpoint is."""
        self.digests: list[bytes] = []
        """Content hashes of its leading blocks, as far as they were computed."""

    def measure(self, specs: Sequence[PageSpec]) -> None:
        """Recomputes the token slots held in every token-paged group."""
        capacity = UNLIMITED_TOKENS
        for spec, run in zip(specs, self.runs, strict=True):
            if spec.kind is not PageKind.STATE:
                capacity = min(capacity, run.end * spec.page_tokens)
        self.capacity_tokens = capacity

    def lacking(self, specs: Sequence[PageSpec], num_tokens: int) -> dict[int, int]:
        """Pages by group number that slots [0, num_tokens) need beyond what is held."""
        need: dict[int, int] = {}
        for group, (spec, run) in enumerate(zip(specs, self.runs, strict=True)):
            missing = pages_for(spec, num_tokens) - run.end
            if missing > 0:
                need[group] = missing
        return need

    def behind(self, group: int, spec: PageSpec, num_computed_tokens: int) -> list[int]:
        """Takes the pages of a window that no later query can see off the run."""
        run = self.runs[group]
        visible = first_visible_page(spec, num_computed_tokens)
        count = min(visible - run.first, len(run.pages))
        if count <= 0:
            if not run.pages:
                run.first = max(run.first, visible)
            return []
        gone = run.pages[:count]
        del run.pages[:count]
        run.first += count
        return gone
