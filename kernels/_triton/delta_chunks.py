"""The gated delta rule over long rows by fla-core's chunked kernels, where that library is there and serves."""

from __future__ import annotations

import os
from functools import cache

import torch

from kernels._triton.recurrent import gather_states, scatter_states


@cache
def problem() -> str | None:
    """Why fla-core cannot be used in this process; None where it can."""
    # The library's choice among further backends costs more of a step's time on the host than the launches themselves.
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: F401
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
    chunk_index: torch.Tensor,
) -> torch.Tensor:
    """See :func:`kernels.recurrent.delta_rule_chunks`; products in bfloat16, states and sums in float32, the answer in
    bfloat16.

    Args:
        query_start: [rows + 1] int64. The library keeps what it makes of the last few such tensors, by identity: a new
            one for every pass.
        chunk_index: [chunks, 2] int64, row and number of each chunk of 64 tokens. Given, so that the library does not
            make it, which waits for the device. Padding names chunks past a row's end.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    state = gather_states(state_pages, page)
    out, last = chunk_gated_delta_rule(
        query.unsqueeze(0).to(torch.bfloat16),
        key.unsqueeze(0).to(torch.bfloat16),
        value.unsqueeze(0).to(torch.bfloat16),
        log_decay.unsqueeze(0),
        beta.unsqueeze(0),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=query_start,
        chunk_indices=chunk_index,
    )
    scatter_states(state_pages, page, last.to(state_pages.dtype))
    return out.squeeze(0)
