"""The gated delta rule over long rows: fla-core's kernels inside of chunks, our own from chunk to chunk."""

from __future__ import annotations

import math
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from kernels._triton.delta_carry import CHUNK, carry_states

KNOWN = "0.6."
"""Releases of fla-core whose inner functions, which it promises nobody, are those called here."""


@cache
def problem() -> str | None:
    """Why fla-core cannot be used in this process; None where it can."""
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return "fla-core is not installed"
    if not found.startswith(KNOWN):
        return f"fla-core is {found}, and only {KNOWN}x has the inner functions that are called"
    # The library's choice among further backends costs more of a step's time on the host than the launches themselves.
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    try:
        from fla.ops.common.chunk_o import chunk_fwd_o  # noqa: F401
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra  # noqa: F401
        from fla.ops.utils import chunk_local_cumsum  # noqa: F401
    except (
        Exception
    ) as error:  # its import compiles and probes: anything may go wrong, and none of it is fatal here
        return f"fla-core cannot be imported ({type(error).__name__}: {error})"
    return None


def delta_rule_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    query_start: torch.Tensor,
    first_chunk: torch.Tensor,
    chunk_index: torch.Tensor,
) -> torch.Tensor:
    """See :func:`kernels.recurrent.delta_rule_chunks`; products in bfloat16, states and sums in float32, the answer in
    bfloat16.

    Args:
        page: [rows] int64, -1 for padding; query_start: [rows + 1] int64.
        first_chunk: [rows] int64, each row's first place in ``chunk_index``.
        chunk_index: [chunks, 2] int64, row and number of each chunk of 64 tokens. Given, so that the library does not
            make it, which waits for the device. Padding names chunks past a row's end.
    """
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.utils import chunk_local_cumsum

    cut = {"cu_seqlens": query_start, "chunk_indices": chunk_index, "chunk_size": CHUNK}
    q, k, v = (x.to(torch.bfloat16).unsqueeze(0) for x in (query, key, value))
    sums = chunk_local_cumsum(log_decay.unsqueeze(0), scale=1.0 / math.log(2.0), **cut)
    removed, written, _ = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=sums, beta=beta.unsqueeze(0), **cut)
    entering, values = carry_states(
        k[0], written[0], removed[0], sums[0], state_pages, page, query_start, first_chunk, len(chunk_index)
    )
    out = chunk_fwd_o(q=q, k=k, v=values.unsqueeze(0), h=entering.unsqueeze(0), g=sums, scale=1.0, **cut)
    return out.squeeze(0)
