"""Says what a page of each kind looks like and where its grid lies in the arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memory.api import LayerRows, PageKind, PageSpec, Row


@dataclass(frozen=True, slots=True)
class Grid:
    """A kind's pages over the whole buffer: page ``p`` lies at ``anchor_bytes + p * page_bytes``.

    A FULL grid ends exactly at the arena's end; all others begin at byte 0.
    """

    anchor_bytes: int
    page_bytes: int
    num_pages: int

    @classmethod
    def over(cls, arena_bytes: int, page_bytes: int, *, ends_at_end: bool = False) -> Grid:
        """The grid of pages of ``page_bytes`` over an arena; ``ends_at_end`` shifts it to touch the arena's end."""
        num_pages = arena_bytes // page_bytes
        return cls(arena_bytes - num_pages * page_bytes if ends_at_end else 0, page_bytes, num_pages)

    def address(self, page: int) -> int:
        """First byte of a page (``page`` may be ``num_pages``: the end of the grid)."""
        return self.anchor_bytes + page * self.page_bytes

    def page_up(self, byte: int) -> int:
        """The first page that begins at or after ``byte``."""
        return max(0, -((self.anchor_bytes - byte) // self.page_bytes))

    def page_down(self, byte: int) -> int:
        """The page boundary at or below ``byte``: pages before it end there at the latest."""
        return min(self.num_pages, max(0, (byte - self.anchor_bytes) // self.page_bytes))


def attention_spec(
    name: str,
    layers: Iterable[int],
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    page_tokens: int,
    *,
    window: int | None = None,
    scales: bool = False,
) -> PageSpec:
    """Keys and values of ``layers``: FULL, or WINDOW when ``window`` is given. ``scales`` adds one float32 per head
    for keys and for values, as FP8 KV needs them."""
    shape = (num_kv_heads, head_dim)
    rows = [Row("k", shape, dtype), Row("v", shape, dtype)]
    if scales:
        rows += [Row("k_scale", (num_kv_heads,), "float32"), Row("v_scale", (num_kv_heads,), "float32")]
    kind = PageKind.FULL if window is None else PageKind.WINDOW
    return PageSpec(name, kind, page_tokens, tuple(LayerRows(layer, tuple(rows)) for layer in layers), window)


def latent_spec(
    name: str,
    layers: Iterable[int],
    latent_dim: int,
    dtype: str,
    page_tokens: int,
    *,
    index_dim: int = 0,
    index_dtype: str = "uint8",
    index_scale: bool = False,
) -> PageSpec:
    """MLA: one latent row per token and layer, with an index key beside it for sparse attention when ``index_dim``
    is given (``index_scale``: one float32 for the key, as an 8-bit index key needs it)."""
    rows = [Row("latent", (latent_dim,), dtype)]
    if index_dim:
        rows.append(Row("index_key", (index_dim,), index_dtype))
        if index_scale:
            rows.append(Row("index_scale", (1,), "float32"))
    return PageSpec(
        name, PageKind.FULL, page_tokens, tuple(LayerRows(layer, tuple(rows)) for layer in layers)
    )


def state_spec(name: str, layers: Iterable[int], parts: Sequence[Row]) -> PageSpec:
    """One recurrent state over all ``layers``; the parts of a layer may differ in shape and dtype."""
    return PageSpec(name, PageKind.STATE, 1, tuple(LayerRows(layer, tuple(parts)) for layer in layers))


def expert_spec(name: str, place_bytes: int) -> PageSpec:
    """The expert place: one block of one expert of one layer, as opaque bytes."""
    return PageSpec(name, PageKind.EXPERT, 1, (LayerRows(0, (Row("block", (place_bytes,), "uint8"),)),))


def with_draft(spec: PageSpec, draft: Sequence[LayerRows]) -> PageSpec:
    """``spec`` with the rows of a draft's layers in the same entries, so that both always travel together."""
    taken = {layer.layer for layer in spec.layers}
    clash = sorted(taken & {layer.layer for layer in draft})
    if clash:
        raise ValueError(f"draft layers {clash} of {spec.name!r} carry numbers of the model's own layers")
    return replace(spec, layers=spec.layers + tuple(draft))


def first_visible_page(spec: PageSpec, num_computed_tokens: int) -> int:
    """The first logical page that the next query (at position ``num_computed_tokens``) or a later one can see.

    A query at position q of a window w sees positions q - w + 1 .. q.
    """
    if spec.window is None:
        return 0
    return max(0, num_computed_tokens - spec.window + 1) // spec.page_tokens


def pages_for(spec: PageSpec, num_tokens: int) -> int:
    """Logical pages that cover token slots [0, num_tokens); a STATE group always has one."""
    if spec.kind is PageKind.STATE:
        return 1
    return -(-num_tokens // spec.page_tokens)


def most_pages(spec: PageSpec, num_tokens: int, chunk_tokens: int) -> int:
    """The most pages that a request of ``num_tokens`` holds at once when computed in chunks of ``chunk_tokens``.

    A window holds what the chunk's first query sees, the chunk itself, and, while the step before is still in
    flight, the page that was just let go.
    """
    if spec.kind is PageKind.STATE:
        return 1
    pages = pages_for(spec, num_tokens)
    if spec.window is None:
        return pages
    span = spec.window - 1 + max(1, chunk_tokens)
    return min(pages, -(-(span + spec.page_tokens - 1) // spec.page_tokens) + 1)
