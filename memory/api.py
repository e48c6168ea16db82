"""The face of the memory room: what a page is, how pages are asked for, and what is left.

Everything here is a plain value or a protocol: no torch, no device. The scheduler asks a :class:`Ledger`;
the device half of the room carries its :class:`StepCommands` out. Requests are known by a small int that the
scheduler chose; pages by *virtual* ids, which stay valid while pages move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Protocol

PAGE_ALIGN_BYTES = 128
"""Pages, and the layer blocks inside them, are multiples of this, so that every row block is vector-aligned."""

CHECKPOINT_TOKENS = 64
"""Checkpoints of hybrid models and the chunk cuts of deterministic mode lie at absolute multiples of this."""

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8,
}  # fmt: skip


class PageKind(Enum):
    """What a page holds. FULL and WINDOW pages hold tokens, a STATE page one recurrent state, an EXPERT place one
    expert of one layer."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    EXPERT = "expert"


def align_bytes(num_bytes: int) -> int:
    """Rounds ``num_bytes`` up to the next multiple of :data:`PAGE_ALIGN_BYTES`."""
    return -(-num_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Row:
    """One named tensor row that an entry has in one layer, e.g. ``Row("k", (4, 128), "bfloat16")``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry's row."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows that one model layer contributes to an entry. A draft's layers ride along under their own numbers."""

    layer: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Where one layer's row lies inside a page: ``page_tokens`` rows one behind the other from ``offset_bytes``."""

    layer: int
    row: Row
    offset_bytes: int


@dataclass(frozen=True)
class PageSpec:
    """Shape of one kind of page. Inside a page bytes are grouped by layer, then by row.

    Attributes:
        name: key of the group, unique in an arena: ``"full"``, ``"window128"``, ``"state"``, ``"expert"``.
        kind: what the page holds.
        page_tokens: entries per page; 1 for STATE and EXPERT.
        layers: the rows of each layer that takes part, in order.
        window: for WINDOW, how many of the last tokens a query sees, itself included; else None.
    """

    name: str
    kind: PageKind
    page_tokens: int
    layers: tuple[LayerRows, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or not self.layers:
            raise ValueError(f"page spec {self.name!r} needs page_tokens >= 1 and at least one layer")
        if (self.kind is PageKind.WINDOW) != (self.window is not None):
            raise ValueError(f"page spec {self.name!r}: a window belongs to WINDOW pages and to no others")
        if self.kind in (PageKind.STATE, PageKind.EXPERT) and self.page_tokens != 1:
            raise ValueError(f"page spec {self.name!r}: a {self.kind.value} page holds exactly one entry")

    @property
    def blocks(self) -> tuple[RowBlock, ...]:
        """Every row block of the page with its byte offset, in layout order."""
        found: list[RowBlock] = []
        offset = 0
        for layer in self.layers:
            for row in layer.rows:
                found.append(RowBlock(layer.layer, row, offset))
                offset += align_bytes(row.num_bytes * self.page_tokens)
        return tuple(found)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of :data:`PAGE_ALIGN_BYTES`."""
        return sum(
            align_bytes(row.num_bytes * self.page_tokens) for layer in self.layers for row in layer.rows
        )


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a token sequence the prefix tree holds *in every kind*; valid until the next ``begin_step``.

    ``num_tokens`` is 0 or a page boundary (for models with STATE or WINDOW: a checkpoint). ``host_bytes`` must be
    copied back from the host tier before the pages can be read. ``node`` is the ledger's own key.
    """

    num_tokens: int = 0
    host_bytes: int = 0
    node: int = -1


NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class PageAsk:
    """Room for one request, over all kinds at once.

    Attributes:
        request: the scheduler's number for the request.
        num_tokens: token slots [0, num_tokens) must be writable or already written after the grant.
        num_computed_tokens: tokens already computed; window pages that no later query can see are let go.
        match: on a request's first grant, the prefix to share (its STATE is copied on write); else NO_MATCH.
    """

    request: int
    num_tokens: int
    num_computed_tokens: int = 0
    match: PrefixMatch = NO_MATCH


@dataclass(frozen=True, slots=True)
class PageGrowth:
    """Virtual pages that a grant appended to one group of a request, from logical page ``first`` on."""

    group: str
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer "yes": what was appended. Empty when the request already had the room."""

    growth: tuple[PageGrowth, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """The answer "not now" (or, with ``never``, "not in this arena"): bytes missing per group, bytes on their way.

    ``pending_bytes`` come free when steps in flight are done: wait for them before sending anybody back.
    """

    missing_bytes: Mapping[str, int]
    pending_bytes: int = 0
    never: bool = False


@dataclass(frozen=True, slots=True)
class PageRun:
    """A request's pages in one group: ``pages[i]`` is the virtual page of logical page ``first + i``.

    ``first`` is above 0 only for WINDOW pages already let go. A STATE group has one page.
    """

    first: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """New virtual-to-physical entries of one group's page table; physical -1 unbinds."""

    group: str
    virtual: tuple[int, ...]
    physical: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one page's bytes between two physical pages of a group. A *sealed* page may be copied beside running
    steps; a mutable one only on the compute stream, between two steps."""

    group: str
    virtual: int
    source: int
    target: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the content of physical page ``source`` to ``target`` on the compute stream ahead of the step
    (copy-on-write of states, checkpoints). ``to_host``/``from_host`` mark the side that is a host-tier slot."""

    group: str
    source: int
    target: int
    to_host: bool = False
    from_host: bool = False


@dataclass(frozen=True, slots=True)
class PlaceRange:
    """Expert places [first, last) on the expert grid."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StepCommands:
    """Everything the device half must do before step ``step``, in this order: ban, moves, copies, table, allow."""

    step: int
    ban: tuple[PlaceRange, ...] = ()
    moves: tuple[Move, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    table: tuple[TableUpdate, ...] = ()
    allow: tuple[PlaceRange, ...] = ()


@dataclass(frozen=True, slots=True)
class KindHeadroom:
    """Bytes of one group. ``free`` can be granted now, ``reclaimable`` after eviction, ``pending`` at a known step;
    ``pinned`` cannot move; ``used`` belongs to running requests. Gap bytes that several groups could grow into are
    counted in :attr:`Headroom.gap_bytes`, never here."""

    free_bytes: int = 0
    reclaimable_bytes: int = 0
    pending_bytes: int = 0
    pinned_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Headroom:
    """What the arena can still give, per group of pages; nothing is counted twice."""

    arena_bytes: int = 0
    gap_bytes: int = 0
    kinds: Mapping[str, KindHeadroom] = field(default_factory=dict)

    @property
    def available_bytes(self) -> int:
        """Bytes that can be had without sending anybody back: gap, holes, evictable and pending pages."""
        held = self.kinds.values()
        return self.gap_bytes + sum(k.free_bytes + k.reclaimable_bytes + k.pending_bytes for k in held)


class Ledger(Protocol):
    """The one book the scheduler asks. All answers are plain values; only misuse raises (``LedgerError``).

    A step's life: ``begin_step`` -> any number of ``match``/``grant``/``release``/``checkpoint`` ->
    ``commit_step`` (what the device must do first) -> the step runs -> ``end_step``.
    """

    @property
    def specs(self) -> Mapping[str, PageSpec]:
        """The page specs by group name."""
        ...

    def begin_step(self, step: int, completed_step: int) -> None:
        """Opens step ``step``; steps up to ``completed_step`` have finished on the device, so frees that waited for
        them are done and moves may be planned."""
        ...

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Longest cached prefix of ``token_ids`` that every kind has; never the whole sequence, since at least one
        token must be computed."""
        ...

    def grant(self, ask: PageAsk) -> Grant | Shortage:
        """All pages that ``ask`` lacks, of all kinds, or none."""
        ...

    def can_ever_grant(self, num_tokens: int) -> Shortage | None:
        """None if a request of ``num_tokens`` fits the empty arena, else the shortage (``never`` set)."""
        ...

    def capacity_tokens(self, request: int) -> int:
        """Token slots that ``request`` holds in its token-paged groups; asks up to it need no grant."""
        ...

    def pages(self, request: int, group: str) -> PageRun:
        """The request's virtual pages in a group."""
        ...

    def checkpoint(
        self,
        request: int,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str = "",
        rolling: bool = False,
    ) -> bool:
        """Offers the request's pages up to ``num_tokens`` (all computed by steps already planned) to the prefix
        tree. Groups with STATE or WINDOW take a bundle, which needs ``num_tokens`` to be a multiple of
        :data:`CHECKPOINT_TOKENS` and the state to be exactly there now. False: declined (no room, cache off).
        A ``rolling`` bundle takes the place of the request's last rolling one, unless somebody went on from that."""
        ...

    def release(
        self, request: int, token_ids: Sequence[int] = (), num_computed_tokens: int = 0, salt: str = ""
    ) -> None:
        """Ends the request's ownership: pages are logically free at once, their bytes when no step in flight reads
        them. With ``token_ids`` its computed pages are donated to the prefix tree where that is sound."""
        ...

    def release_bytes(self, request: int) -> int:
        """Bytes that ``release`` would bring: pages that nobody shares."""
        ...

    def pin(self, request: int) -> int:
        """Pins all pages of a request against moving and reuse (a transfer reads them); answers a pin number."""
        ...

    def unpin(self, pin: int) -> None:
        """Ends a pin."""
        ...

    def commit_step(self, step: int) -> StepCommands:
        """Closes planning of ``step`` and answers what the device half must do ahead of it, once."""
        ...

    def end_step(self, step: int) -> None:
        """The result of ``step`` was applied on the host."""
        ...

    def headroom(self) -> Headroom:
        """What is left, exactly."""
        ...

    def audit(self) -> None:
        """Proves that every page has exactly one owner and bytes are conserved; raises ``LedgerError`` if not."""
        ...


class LedgerError(RuntimeError):
    """A broken invariant or misuse of the ledger: a bug, never a shortage. The replica must die."""
