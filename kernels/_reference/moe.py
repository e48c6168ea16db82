"""Routing and resident experts in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch


class Experts(Protocol):
    """What :class:`kernels.moe.ExpertBank` holds."""

    @property
    def gate_up(self) -> torch.Tensor: ...
    @property
    def down(self) -> torch.Tensor: ...
    @property
    def gate_up_bias(self) -> torch.Tensor | None: ...
    @property
    def down_bias(self) -> torch.Tensor | None: ...
    def activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...


def route(
    logits: torch.Tensor, experts_per_token: int, renormalise: bool, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax routing; see the face."""
    logits = logits.float()
    if renormalise:
        # Softmax over all, cut to the best and divided by their sum, is softmax over the best.
        best, experts = torch.topk(logits, experts_per_token, dim=-1)
        weights = torch.softmax(best, -1)
    else:
        weights, experts = torch.topk(torch.softmax(logits, -1), experts_per_token, dim=-1)
    return weights, experts if live is None else experts.masked_fill(~live.unsqueeze(1), -1)


def run_experts(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: Experts) -> torch.Tensor:
    """See the face. (token, expert) pairs are sorted by expert, with one product per expert over its run."""
    per_token = experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    token = order // per_token
    rows = x.index_select(0, token)
    out = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=bank.gate_up.shape[0]).tolist()):
        if count == 0:
            continue
        run = slice(start, start + count)
        both = torch.mm(rows[run], bank.gate_up[expert].to(x.dtype))
        if bank.gate_up_bias is not None:
            both = both.add_(bank.gate_up_bias[expert])
        gate, up = both.chunk(2, -1)
        torch.mm(bank.activation(gate, up), bank.down[expert].to(x.dtype), out=out[run])
        start += count
    out.mul_(weights.to(x.dtype).flatten().index_select(0, order).unsqueeze(1))
    total = torch.zeros_like(x).index_add_(0, token, out)
    return _add_down_bias(total, weights, experts, bank)


def _add_down_bias(
    out: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: Experts
) -> torch.Tensor:
    if bank.down_bias is None:
        return out
    bias = bank.down_bias.index_select(0, experts.flatten()).view(*experts.shape, -1)
    return out + (bias * weights.to(out.dtype).unsqueeze(-1)).sum(1)
