"""Routing in Triton: a program picks one token's experts, best first, ties to the lowest number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps


@triton.jit
def _route(
    logits, weights, chosen, live, row_stride, experts,
    PER_TOKEN: tl.constexpr, RENORMALISE: tl.constexpr, HAS_LIVE: tl.constexpr, PAD: tl.constexpr, K_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PAD)
    real = expert < experts
    left = tl.load(logits + row * row_stride + expert, mask=real, other=-float("inf")).to(tl.float32)
    most = tl.max(left, 0)
    everything = tl.sum(tl.exp(left - most), 0)
    place = tl.arange(0, K_PAD)
    best = tl.full([K_PAD], -float("inf"), tl.float32)
    number = tl.zeros([K_PAD], tl.int32)
    taken = expert >= experts
    for choice in tl.static_range(PER_TOKEN):
        high = tl.max(tl.where(taken, -float("inf"), left), 0)
        # NaN logits match nothing; the lowest expert not taken yet stands in, so that every choice is an expert.
        fits = (left == high) & (taken == 0)
        found = tl.min(tl.where(fits, expert, PAD), 0)
        found = tl.where(found == PAD, tl.min(tl.where(taken, PAD, expert), 0), found)
        best = tl.where(place == choice, high, best)
        number = tl.where(place == choice, found, number)
        taken = taken | (expert == found)
    share = tl.exp(best - most)
    if RENORMALISE:
        share /= tl.sum(share, 0)
    else:
        share /= everything
    if HAS_LIVE:
        number = tl.where(tl.load(live + row) != 0, number, -1)
    at = row * PER_TOKEN + place
    tl.store(weights + at, share, mask=place < PER_TOKEN)
    tl.store(chosen + at, number.to(tl.int64), mask=place < PER_TOKEN)


def route(
    logits: torch.Tensor, experts_per_token: int, renormalise: bool, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`kernels.moe.route`; logits [tokens, experts], rows may lie apart."""
    tokens, experts = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    weights = torch.empty(tokens, experts_per_token, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, experts_per_token, dtype=torch.int64, device=logits.device)
    pad, overlap = max(16, triton.next_power_of_2(experts)), overlaps(logits)
    _route[(tokens,)](
        logits, weights, chosen, chosen if live is None else live, logits.stride(0), experts,
        PER_TOKEN=experts_per_token, RENORMALISE=renormalise, HAS_LIVE=live is not None, PAD=pad,
        K_PAD=triton.next_power_of_2(experts_per_token), OVERLAP=overlap, num_warps=1 if pad <= 256 else 4,
        launch_pdl=overlap,
    )  # fmt: skip
    return weights, chosen
