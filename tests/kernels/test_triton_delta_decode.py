"""The decode kernels of a Gated DeltaNet layer against the plain steps that they stand for."""

from __future__ import annotations

import pytest
import torch

from kernels._reference import pointwise as plain_pointwise
from kernels._reference import recurrent as plain
from kernels._triton.delta_decode import DeltaParameters, delta_net_decode, fits
from kernels._triton.delta_heads import split_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, PAGES = 4, 7


def parameters(k_heads: int, v_heads: int, dim: int, dtype: torch.dtype) -> DeltaParameters:
    channels = (2 * k_heads + v_heads) * dim
    return DeltaParameters(
        conv=(torch.randn(WIDTH, channels) * 0.5).to(DEVICE, dtype),
        decay_rate=-torch.rand(v_heads, device=DEVICE) - 0.1,
        decay_bias=torch.randn(v_heads, device=DEVICE),
        norm=torch.rand(dim, device=DEVICE) + 0.5,
        num_key_heads=k_heads,
        num_value_heads=v_heads,
        head_dim=dim,
        eps=1e-6,
        l2_eps=1e-6,
    )


def plain_steps(
    inner: torch.Tensor, p: DeltaParameters, conv: torch.Tensor, states: torch.Tensor, page: torch.Tensor
) -> torch.Tensor:
    rows, dim, keys = len(inner), p.head_dim, 2 * p.num_key_heads
    channels = (keys + p.num_value_heads) * dim
    mixed = plain.causal_conv_step(inner[:, :channels], p.conv, conv, page).float()
    heads = mixed.view(rows, -1, dim)
    normed = plain_pointwise.l2_norm(heads[:, :keys], p.l2_eps)
    values = p.num_value_heads * dim
    strength = inner[:, channels + values :]
    _, decay, beta = plain.delta_gates(strength, p.decay_bias, p.decay_rate)
    read = plain.delta_rule_step(
        normed[:, : p.num_key_heads] * dim**-0.5,
        normed[:, p.num_key_heads :],
        heads[:, keys:],
        decay,
        beta,
        states,
        page,
    )
    z = inner[:, channels : channels + values].float().view(rows, -1, dim)
    gated = plain_pointwise.rms_norm(read, p.norm, p.eps) * plain_pointwise.silu(z)
    return gated.flatten(1).to(inner.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k_heads", "v_heads", "dim"), [(2, 4, 16), (1, 3, 64), (2, 2, 128)])
def test_two_launches_are_the_plain_steps(k_heads: int, v_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    p = parameters(k_heads, v_heads, dim, dtype)
    assert fits(p)
    channels = (2 * k_heads + v_heads) * dim
    wide = channels + v_heads * dim + 2 * v_heads
    store = torch.randn(5, wide + 8).to(DEVICE, dtype)
    inner = store[:, :wide]
    conv = torch.randn(PAGES, WIDTH - 1, channels).to(DEVICE, dtype)
    states = torch.randn(PAGES, v_heads, dim, dim, device=DEVICE)
    page = torch.tensor([3, -1, 0, 6, -1], device=DEVICE)
    live = page >= 0
    conv_before, states_before = conv.clone(), states.clone()
    wanted_conv, wanted_states = conv.clone(), states.clone()
    wanted = plain_steps(inner[live], p, wanted_conv, wanted_states, page[live])
    found = delta_net_decode(inner, p, conv, states, page)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found[live], wanted, **tolerance)
    torch.testing.assert_close(conv, wanted_conv)
    torch.testing.assert_close(states, wanted_states, rtol=tolerance["rtol"], atol=tolerance["atol"])
    assert (found[~live] == 0).all()
    unused = [n for n in range(PAGES) if n not in page.tolist()]
    assert torch.equal(states[unused], states_before[unused])
    assert torch.equal(conv[unused], conv_before[unused])


def test_heads_that_are_too_large_are_left_to_others() -> None:
    assert not fits(parameters(1, 1, 256, torch.float32))
    assert not fits(parameters(1, 1, 24, torch.float32))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (128, 128), (24, 40)])
def test_heads_are_split_and_normed(key_dim: int, value_dim: int) -> None:
    torch.manual_seed(key_dim)
    channels = 2 * 2 * key_dim + 3 * value_dim
    mixed = torch.randn(11, channels + 5).to(DEVICE, torch.bfloat16)[:, :channels]
    query, key, value = split_heads(mixed, (2, 3, key_dim, value_dim), 1e-6, torch.bfloat16)
    wide = mixed.float()
    normed = plain_pointwise.l2_norm(wide[:, : 4 * key_dim].view(11, 4, key_dim), 1e-6)
    torch.testing.assert_close(query.float(), normed[:, :2] * key_dim**-0.5, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(key.float(), normed[:, 2:], rtol=1e-2, atol=1e-3)
    assert torch.equal(value.flatten(1), mixed[:, 4 * key_dim :])
    assert all(found.is_contiguous() for found in (query, key, value))
