"""Paged attention by FlashAttention 2 or 3: rows of one token, whose keys it shares out, and others in a call each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from worker.attention.base import AttentionPlan, AttentionShape, KvPages, PagedGeometry
from worker.attention.flash_library import FlashLibrary, find_library

_DTYPES = ("bfloat16", "float16")
_PAGE_TOKENS_2 = 16
"""Version 2 reads pages in pieces of so many entries."""


@dataclass(frozen=True, slots=True)
class FlashCall:
    """Rows as the library wants them: the tokens they begin at and end before (None: with the step's), their geometry,
    pages counted from each row's first one, int32, and how the work is shared out (None: found anew in each layer)."""

    first_token: int
    last_token: int | None
    geometry: PagedGeometry
    tables: torch.Tensor
    kv_len: torch.Tensor
    schedule: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """A step's calls: rows of one token beside longer ones have their own."""

    shape: AttentionShape
    calls: tuple[FlashCall, ...]


class FlashAttention:
    """The library's operator; in CUDA graphs too, where ``plan`` is part of the graph."""

    name = "flash"
    capturable = True

    def unusable_reason(self, shape: AttentionShape, device: torch.device) -> str | None:
        """What the library, its version or its GPU cannot do."""
        found = find_library(device)
        if isinstance(found, str):
            return found
        if shape.kv_dtype == "float8_e4m3fn":
            return (
                "keys and values in FP8 have a scale per token and head, and FlashAttention takes one per row"
            )
        if shape.kv_dtype not in _DTYPES:
            return f"FlashAttention computes in {' or '.join(_DTYPES)}, not in {shape.kv_dtype}"
        if shape.head_dim > 256 or shape.head_dim % 8:
            return f"head_dim={shape.head_dim} is not a multiple of 8 up to 256"
        if found.version == 2 and shape.window is not None and shape.window < 4 * _PAGE_TOKENS_2:
            return f"FlashAttention 2 cannot read the small pages of a window of {shape.window}"
        if shape.has_sinks and not found.takes("s_aux"):
            return f"FlashAttention {found.version} in {found.path.name} knows no attention sinks"
        return None

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        """Launches what turns tables to int32 and counts a window's rows from their first page."""
        library = _library(geometry.kv_len.device)
        if library.version == 2 and geometry.page_tokens % _PAGE_TOKENS_2:
            raise ValueError(
                f"FlashAttention 2 reads {_PAGE_TOKENS_2} entries at once: {geometry.page_tokens=}"
            )
        decode = geometry.num_decode_rows
        if not 0 < decode < geometry.kv_len.shape[0]:
            return FlashPlan(shape, (_call(library, shape, geometry, 0, None),))
        ones = replace(
            geometry,
            query_start=geometry.query_start[: decode + 1],
            kv_len=geometry.kv_len[:decode],
            tables=geometry.tables[:decode],
            first_page=geometry.first_page[:decode],
            max_query_len=1,
        )
        others = replace(
            geometry,
            query_start=geometry.query_start[decode:] - decode,
            kv_len=geometry.kv_len[decode:],
            tables=geometry.tables[decode:],
            first_page=geometry.first_page[decode:],
            num_decode_rows=0,
        )
        return FlashPlan(
            shape, (_call(library, shape, ones, 0, decode), _call(library, shape, others, decode, None))
        )

    def run(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        pages: KvPages,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`worker.attention.base.AttentionBackend`."""
        assert isinstance(plan, FlashPlan)
        dtype = pages.key.dtype
        same = query.dtype == dtype
        result = out if same else torch.empty(out.shape, dtype=dtype, device=out.device)
        query = query if same else query.to(dtype)
        library = _library(query.device)
        for call in plan.calls:
            span = slice(call.first_token, call.last_token)
            library.call(
                {
                    **_common(plan.shape, call.geometry, call.kv_len),
                    # Version 2 wants one, and looks at seqused_k instead.
                    "cu_seqlens_k": call.geometry.query_start if library.version == 2 else None,
                    "q": query[span],
                    "k": pages.key,
                    "v": pages.value,
                    "out": result[span],
                    "page_table": call.tables,
                    "block_table": call.tables,
                    "softmax_scale": plan.shape.scale,
                    "scheduler_metadata": call.schedule,
                    "s_aux": None if sinks is None else sinks.to(torch.bfloat16),
                }
            )
        return out if same else out.copy_(result)


def _library(device: torch.device) -> FlashLibrary:
    found = find_library(device)
    if isinstance(found, str):
        raise RuntimeError(f"flash was chosen though it is not usable: {found}")
    return found


def _call(
    library: FlashLibrary, shape: AttentionShape, geometry: PagedGeometry, first: int, last: int | None
) -> FlashCall:
    # -1 lies behind a row's end, but nothing says that the library does not look.
    tables = geometry.tables.clamp(min=0).to(torch.int32)
    kv_len = (geometry.kv_len - geometry.first_page * geometry.page_tokens).clamp_(min=0)
    schedule = library.schedule(
        {
            **_common(shape, geometry, kv_len),
            "batch_size": kv_len.shape[0],
            "num_heads": shape.num_heads,
            "num_heads_k": shape.num_kv_heads,
            "headdim": shape.head_dim,
            "headdim_v": shape.head_dim,
            "qkv_dtype": getattr(torch, shape.kv_dtype),
            "page_size": geometry.page_tokens,
        }
    )
    return FlashCall(first, last, geometry, tables, kv_len, schedule)


def _common(shape: AttentionShape, geometry: PagedGeometry, kv_len: torch.Tensor) -> dict[str, object]:
    """What both of the library's operators are told."""
    reach = -1 if shape.window is None else shape.window - 1
    return {
        "cu_seqlens_q": geometry.query_start,
        "seqused_k": kv_len,
        "max_seqlen_q": geometry.max_query_len,
        "max_seqlen_k": geometry.max_kv_len,
        "is_causal": True,
        "causal": True,
        "window_size_left": reach,
        "window_size_right": 0 if reach >= 0 else -1,
    }
