"""A sublayer in one call brings the bits of its operations one by one."""

from __future__ import annotations

import pytest
import torch

from kernels._native import ops as native
from kernels._native import sublayers
from kernels._native.library import library
from kernels.kv import write_kv
from kernels.linear import Linear
from kernels.moe import ExpertBank, route, run_experts
from kernels.pointwise import (
    GatedActivation,
    gated_norm,
    l2_norm,
    mul_sigmoid,
    rms_norm,
    rotate,
    silu_and_mul,
)
from kernels.recurrent import causal_conv_step, delta_gates, delta_rule_step
from kernels.sublayers import attention_step, delta_net_step, moe_step

HIDDEN, EPS = 40, 1e-6
ROWS = [1, 3, 16, 17, 64]


def linear(columns: int, depth: int, biased: bool = False, short: bool = True) -> Linear:
    weight = torch.randn(columns, depth) * depth**-0.5
    bias = torch.randn(columns) if biased else None
    return Linear(weight.bfloat16().float() if short else weight, bias)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shared", [0, 12])
@pytest.mark.parametrize("biased", [False, True])
def test_experts(rows: int, shared: int, biased: bool) -> None:
    torch.manual_seed(rows)
    num, inner, k = 8, 24, 3
    router = linear(num + (1 + 2 * shared if shared else 0), HIDDEN, biased)
    down = linear(HIDDEN, shared) if shared else None
    activation = GatedActivation(1.0, 1.702) if biased else GatedActivation()
    biases = (torch.randn(num, 2 * inner), torch.randn(num, HIDDEN)) if biased else (None, None)
    bank = ExpertBank(
        torch.randn(num, HIDDEN, 2 * inner), torch.randn(num, inner, HIDDEN), *biases, activation
    )
    step = moe_step(router, bank, k, True, shared, down)
    assert step is not None
    x = torch.randn(rows, HIDDEN)
    assert step.takes(x)
    both = router(x)
    expected = run_experts(x, *route(both[:, :num], k, True), bank)
    if down is not None:
        gate, up = both[:, num + 1 : num + 1 + shared], both[:, num + 1 + shared :]
        expected += down(silu_and_mul(gate, up, share=both[:, num : num + 1]))
    assert torch.equal(step(x), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_delta_net(rows: int) -> None:
    torch.manual_seed(rows)
    k_heads, v_heads, d_k, d_v, width = 2, 4, 24, 20, 4
    keys, values = k_heads * d_k, v_heads * d_v
    channels = 2 * keys + values
    inner, outer = linear(channels + values + 2 * v_heads, HIDDEN), linear(HIDDEN, values, short=False)
    conv, rate, bias, norm = (
        torch.randn(width, channels),
        -torch.rand(v_heads),
        torch.randn(v_heads),
        torch.rand(d_v),
    )
    step = delta_net_step(inner, outer, conv, rate, bias, norm, (k_heads, v_heads, d_k, d_v), EPS, EPS)
    assert step is not None
    # One page holds both: the views are strided, as in the arena.
    buffer = torch.randn(rows + 3, 5000)
    page = torch.randperm(rows + 3)[:rows]

    def views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        conv_pages = pages[:, : (width - 1) * channels].view(-1, width - 1, channels)
        states = pages[:, 2048 : 2048 + v_heads * d_k * d_v].view(-1, v_heads, d_k, d_v)
        return conv_pages, states

    x, beside = torch.randn(rows, HIDDEN), buffer.clone()
    assert step.takes(x, *views(buffer))
    found = step(x, *views(buffer), page)

    both = inner(x)
    conv_pages, states = views(beside)
    _, decay, beta = delta_gates(both[:, channels + values :], bias, rate)
    mixed = causal_conv_step(both[:, :channels], conv, conv_pages, page)
    normed = l2_norm(mixed[:, : 2 * keys].view(rows, -1, d_k), EPS)
    query = normed[:, :k_heads] * d_k**-0.5
    value = mixed[:, 2 * keys :].view(rows, v_heads, d_v)
    read = delta_rule_step(query, normed[:, k_heads:], value, decay, beta, states, page)
    gated = gated_norm(read, both[:, channels : channels + values], norm, EPS)
    assert torch.equal(found, outer(gated.flatten(1)))
    assert torch.equal(buffer, beside)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_attention(rows: int, gated: bool, normed: bool) -> None:
    torch.manual_seed(rows)
    heads, kv_heads, dim, half, page_tokens = 6, 2, 20, 8, 16
    turned = heads + kv_heads
    inner = linear((turned + kv_heads + (heads if gated else 0)) * dim, HIDDEN, biased=not gated)
    outer = linear(HIDDEN, heads * dim, biased=not gated)
    norm = torch.rand(turned, dim) if normed else None
    step = attention_step(inner, outer, norm, (heads, kv_heads, dim), gated, EPS)
    assert step is not None
    buffer = torch.randn(9, 3, page_tokens, kv_heads, dim)
    beside = buffer.clone()
    slot = torch.randperm(9 * page_tokens)[:rows]
    page, offset = slot // page_tokens, slot % page_tokens
    cos, sin = torch.randn(rows, half), torch.randn(rows, half)
    x = torch.randn(rows, HIDDEN)
    assert step.takes(x, buffer[:, 0], buffer[:, 2])
    query, held = step.front(x, cos, sin, buffer[:, 0], buffer[:, 2], page, offset)

    both = inner(x)
    all_heads = both[:, : (turned + kv_heads) * dim].view(rows, -1, dim)
    query_key = all_heads[:, :turned]
    query_key = rotate(rms_norm(query_key, norm, EPS) if norm is not None else query_key, cos, sin)
    write_kv(query_key[:, heads:], all_heads[:, turned:], beside[:, 0], beside[:, 2], page, offset)
    assert torch.equal(query, query_key[:, :heads])
    assert torch.equal(buffer, beside)
    mixed = torch.randn(rows, heads, dim)
    expected = mixed.clone().flatten(1)
    if gated:
        expected = mul_sigmoid(expected, both[:, (turned + kv_heads) * dim :])
    assert torch.equal(step.back(mixed, held), outer(expected))


def test_what_a_call_does_not_take() -> None:
    router = linear(8, HIDDEN)
    bank = ExpertBank(torch.randn(8, HIDDEN, 16), torch.randn(8, 8, HIDDEN), None, None, GatedActivation())
    step = moe_step(router, bank, 2, True)
    assert step is not None
    assert not step.takes(torch.randn(native.MANY_TOKENS + 1, HIDDEN))
    assert not step.takes(torch.randn(HIDDEN, 4).t())
    assert not step.takes(torch.randn(4, HIDDEN).bfloat16())
    assert moe_step(Linear(torch.randn(8, HIDDEN).bfloat16()), bank, 2, True) is None
    front = attention_step(linear(3 * 16, HIDDEN), linear(HIDDEN, 16), None, (1, 1, 16), False, EPS)
    assert front is not None
    pages, x = torch.randn(2, 8, 1, 16), torch.randn(4, HIDDEN)
    assert front.takes(x, pages, pages)
    assert not front.takes(x, pages, pages.bfloat16())
    assert not front.takes(x, pages.transpose(2, 3), pages)


def test_long_calls_do_not_keep_pythons_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    router, down = linear(8 + 1 + 2 * 12, HIDDEN), linear(HIDDEN, 12)
    bank = ExpertBank(torch.randn(8, HIDDEN, 16), torch.randn(8, 8, HIDDEN), None, None, GatedActivation())
    brief = moe_step(router, bank, 2, True, 12, down)
    monkeypatch.setattr(sublayers, "BRIEF_PRODUCTS", 3 * (33 * HIDDEN + 12 * HIDDEN + 2 * 3 * HIDDEN * 8))
    long, loaded, x = moe_step(router, bank, 2, True, 12, down), library(), torch.randn(9, HIDDEN)
    assert brief is not None
    assert long is not None
    assert loaded is not None
    assert long._call.over(3) is loaded.quick.moe_step
    assert long._call.over(4) is loaded.long.moe_step
    assert torch.equal(long(x), brief(x))
