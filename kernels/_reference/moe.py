"""Routing and resident experts in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """All experts of one layer, resident: gate above up, down transposed.

    Attributes:
        gate_up: [experts, 2 * I, H]; down: [experts, I, H].
        gate_up_bias: [experts, 2 * I] or None; down_bias: [experts, H] or None.
        activation: (gate, up) -> hidden.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: Activation


def route(
    logits: torch.Tensor, experts_per_token: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax routing; see the face."""
    logits = logits.float()
    if renormalise:
        # Softmax over all, cut to the best and divided by their sum, is softmax over the best.
        best, experts = torch.topk(logits, experts_per_token, dim=-1)
        return torch.softmax(best, -1), experts
    weights, experts = torch.topk(torch.softmax(logits, -1), experts_per_token, dim=-1)
    return weights, experts


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs; picks the cheapest of three ways to compute the same sum."""
    num_tokens, per_token = experts.shape
    num_experts, inner, hidden_size = bank.down.shape
    if num_tokens == 1:
        return _gathered(x, weights, experts, bank)
    if 2 * num_tokens * per_token >= num_experts and num_tokens * inner * hidden_size <= _DENSE_PRODUCT:
        return _dense(x, weights, experts, bank)
    return _sorted(x, weights, experts, bank)


_DENSE_PRODUCT = 1 << 18
"""tokens * I * H up to which every expert for every token in two products beats a product per chosen expert (measured
on a CPU with 32 experts of 32 x 256: they meet at 32 tokens)."""


def _gathered(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank
) -> torch.Tensor:
    """One token: the chosen experts' weights are copied together and multiplied as one matrix."""
    chosen = experts[0]
    both = F.linear(x, bank.gate_up.index_select(0, chosen).flatten(0, 1)).view(len(chosen), -1)
    if bank.gate_up_bias is not None:
        both = both + bank.gate_up_bias.index_select(0, chosen)
    gate, up = both.chunk(2, -1)
    hidden = bank.activation(gate, up) * weights.to(x.dtype).t()
    out = torch.mm(hidden.view(1, -1), bank.down.index_select(0, chosen).flatten(0, 1))
    return _add_down_bias(out, weights, experts, bank)


def _dense(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """A middling number of tokens: every expert for every token in two large products, unchosen ones weigh zero."""
    num_experts, double, hidden_size = bank.gate_up.shape
    both = torch.mm(x, bank.gate_up.view(-1, hidden_size).t()).view(-1, num_experts, double)
    if bank.gate_up_bias is not None:
        both = both.add_(bank.gate_up_bias)
    gate, up = both.chunk(2, -1)
    scatter = x.new_zeros(x.shape[0], num_experts).scatter_(1, experts, weights.to(x.dtype))
    hidden = bank.activation(gate, up).mul_(scatter.unsqueeze(-1))
    out = torch.mm(hidden.view(x.shape[0], -1), bank.down.view(-1, hidden_size))
    return _add_down_bias(out, weights, experts, bank)


def _sorted(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """Many tokens: (token, expert) pairs sorted by expert, one product per expert over its run."""
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
        both = torch.mm(rows[run], bank.gate_up[expert].t())
        if bank.gate_up_bias is not None:
            both = both.add_(bank.gate_up_bias[expert])
        gate, up = both.chunk(2, -1)
        torch.mm(bank.activation(gate, up), bank.down[expert], out=out[run])
        start += count
    out.mul_(weights.to(x.dtype).flatten().index_select(0, order).unsqueeze(1))
    total = torch.zeros_like(x).index_add_(0, token, out)
    return _add_down_bias(total, weights, experts, bank)


def _add_down_bias(
    out: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank
) -> torch.Tensor:
    if bank.down_bias is None:
        return out
    bias = bank.down_bias.index_select(0, experts.flatten()).view(*experts.shape, -1)
    return out + (bias * weights.to(out.dtype).unsqueeze(-1)).sum(1)
