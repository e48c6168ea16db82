"""Use counts of experts in one launch a step: a program per row and layer, which alone writes that row's counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._reference.expert_use import MOST_COUNTED


@triton.jit
def _count_use(
    counts, chosen, slots, leaning, num_layers, num_experts, per_token, most,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    at = counts + (slot * num_layers + layer) * num_experts + expert
    now = tl.load(at, mask=real, other=0).to(tl.int32)
    choices = chosen + (row.to(tl.int64) * num_layers + layer) * per_token
    for number in range(0, per_token):
        now += (tl.load(choices + number) == expert).to(tl.int32)
    now = tl.where(real, tl.minimum(now, most), 0)
    tl.store(at, now.to(tl.int16), mask=real)
    leans = ((now > 0) & (2 * num_experts * now >= tl.sum(now, 0))).to(tl.int32)
    bits = tl.reshape(leans, (EXPERTS // 8, 8)) << tl.arange(0, 8)[None, :]
    byte = tl.arange(0, EXPERTS // 8)
    num_bytes = (num_experts + 7) // 8
    out = leaning + (row * num_layers + layer) * num_bytes + byte
    tl.store(out, tl.sum(bits, 1).to(tl.uint8), mask=byte < num_bytes)


def count_use(counts: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.expert_use.count_use`."""
    _, num_layers, num_experts = counts.shape
    rows = len(slots)
    leaning = torch.empty(rows, num_layers, -(-num_experts // 8), dtype=torch.uint8, device=counts.device)
    if rows:
        _count_use[(rows, num_layers)](
            counts, chosen, slots, leaning, num_layers, num_experts, chosen.shape[2], MOST_COUNTED,
            EXPERTS=max(16, triton.next_power_of_2(num_experts)), num_warps=1,
        )  # fmt: skip
    return leaning
