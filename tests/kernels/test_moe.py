"""Routing and resident experts against a loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels._native import ops as native
from kernels._reference import moe as reference
from kernels.moe import ExpertBank, route, run_experts
from kernels.pointwise import GatedActivation

SILU, SWIGLU = GatedActivation(), GatedActivation(1.0, 1.702)


def make_bank(
    num_experts: int, hidden: int, inner: int, biased: bool, activation: GatedActivation
) -> ExpertBank:
    return ExpertBank(
        torch.randn(num_experts, hidden, 2 * inner),
        torch.randn(num_experts, inner, hidden),
        torch.randn(num_experts, 2 * inner) if biased else None,
        torch.randn(num_experts, hidden) if biased else None,
        activation,
    )


def by_hand(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t].tolist(), experts[t].tolist(), strict=True):
            both = x[t] @ bank.gate_up[expert]
            if bank.gate_up_bias is not None:
                both = both + bank.gate_up_bias[expert]
            gate, up = both.chunk(2)
            result = bank.activation(gate.clone(), up.clone()) @ bank.down[expert]
            if bank.down_bias is not None:
                result = result + bank.down_bias[expert]
            out[t] += weight * result
    return out


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize(("biased", "activation"), [(False, SILU), (True, SWIGLU)])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 40, 300])
def test_experts_equal_the_loop(num_tokens: int, biased: bool, activation: GatedActivation) -> None:
    torch.manual_seed(num_tokens)
    bank = make_bank(8, 24, 12, biased, activation)
    x = torch.randn(num_tokens, 24)
    kept = x.clone()
    weights, experts = route(torch.randn(num_tokens, 8), 3, True)
    out = run_experts(x, weights, experts, bank)
    torch.testing.assert_close(out, by_hand(x, weights, experts, bank), rtol=1e-4, atol=1e-3)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (70, 33), (7, 5)])
def test_compiled_and_plain_experts_agree(hidden: int, inner: int, short: bool) -> None:
    bank = make_bank(8, hidden, inner, True, SWIGLU)
    if short:
        for weight in (bank.gate_up, bank.down):
            weight.copy_(weight.bfloat16())
    bank = bank.compacted()
    assert bank.down.dtype == (torch.bfloat16 if short else torch.float32)
    x = torch.randn(40, hidden)
    # Tokens crowd on two experts: runs are longer than what registers hold, and some experts have none.
    weights, experts = route(torch.randn(40, 8) + torch.tensor([9.0, 9, 0, 0, 0, 0, -99, -99]), 3, True)
    out = native.run_experts(x, weights, experts, bank.native)
    plain = reference.run_experts(x, weights, experts, bank)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [5, 300])
def test_an_expert_that_nobody_chose_may_hold_anything(num_tokens: int) -> None:
    bank = make_bank(8, 16, 8, False, SILU)
    bank.gate_up[5].fill_(torch.nan)
    logits = torch.randn(num_tokens, 8)
    logits[:, 5] = -torch.inf
    weights, experts = route(logits, 2, True)
    assert run_experts(torch.randn(num_tokens, 16), weights, experts, bank).isfinite().all()


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route_is_a_softmax_over_all_cut_to_the_best(renormalise: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(50, 40)[:, 3:19].to(dtype)
    weights, experts = route(logits, 4, renormalise)
    expected, order = F.softmax(logits.float(), -1).sort(-1, descending=True)
    expected = expected[:, :4] / (expected[:, :4].sum(-1, keepdim=True) if renormalise else 1.0)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(
        F.softmax(logits.float(), -1).gather(1, experts),
        F.softmax(logits.float(), -1).gather(1, order[:, :4]),
    )
