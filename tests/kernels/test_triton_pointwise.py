"""Triton's norms, rotations, gates and routing against their plain twins: odd sizes, rows apart, no stray write."""

from __future__ import annotations

import math

import pytest
import torch

from kernels._reference import moe as plain_moe
from kernels._reference import pointwise as plain
from kernels._triton import heads as fused
from kernels._triton import moe, pages, pointwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def rows_apart(rows: int, columns: int, dtype: torch.dtype, gap: int = 24) -> torch.Tensor:
    """Random rows inside a wider tensor, NaN between them."""
    store = torch.full((rows, columns + gap), math.nan, dtype=dtype, device=DEVICE)
    store[:, 8 : 8 + columns] = torch.randn(rows, columns).to(DEVICE, dtype)
    return store[:, 8 : 8 + columns]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 300), (3, 64), (5, 17)])
def test_norms(dtype: torch.dtype, heads: int, dim: int) -> None:
    torch.manual_seed(heads)
    x = rows_apart(7, heads * dim, dtype).view(7, heads, dim)
    weight = torch.rand(heads, dim, device=DEVICE) + 0.5
    close(pointwise.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6))
    close(pointwise.rms_norm(x, weight[0], 1e-6), plain.rms_norm(x, weight[0], 1e-6))
    close(pointwise.rms_norm(x, None, 1e-3), plain.rms_norm(x, None, 1e-3))
    close(pointwise.l2_norm(x.float(), 1e-6), plain.l2_norm(x.float(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_joins_the_stream_with_its_norm(dtype: torch.dtype) -> None:
    x, y = torch.randn(5, 130).to(DEVICE, dtype), rows_apart(5, 130, dtype)
    weight = torch.rand(130, device=DEVICE)
    stream = x.clone()
    close(pointwise.add_norm(stream, y, weight, 1e-6), plain.rms_norm(x + y, weight, 1e-6))
    close(stream, x + y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_norm(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 24, device=DEVICE)
    gate, weight = rows_apart(4, 72, dtype), torch.rand(24, device=DEVICE)
    opened = torch.nn.functional.silu(gate.float()).view(x.shape)
    wanted = (plain.rms_norm(x, weight, 1e-6) * opened).to(dtype).flatten(1)
    close(pointwise.gated_norm(x, gate, weight, 1e-6), wanted)
    room = torch.full((6, 72), 7.0, dtype=dtype, device=DEVICE)
    close(pointwise.gated_norm(x, gate, weight, 1e-6, room[1:5]), wanted)
    close(room[1:5], wanted)
    assert (room[[0, 5]] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "half"), [(3, 16, 8), (9, 64, 12), (2, 20, 5)])
def test_rotations(dtype: torch.dtype, heads: int, dim: int, half: int) -> None:
    torch.manual_seed(half)
    x = rows_apart(6, heads * dim, dtype).view(6, heads, dim)
    angle = torch.rand(6, half, device=DEVICE) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weight = torch.rand(heads, dim, device=DEVICE) + 0.5
    normed = plain.rms_norm(x, weight, 1e-6)
    close(pointwise.norm_rotate(x, weight, 1e-6, cos, sin), plain.rotate(normed.clone(), cos, sin))
    wanted = plain.rotate(x.clone(), cos, sin)
    close(pointwise.norm_rotate(x, None, 0.0, cos, sin), wanted)
    pointwise.rotate(x, cos, sin)
    close(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    both, share = rows_apart(5, 2 * 1030, dtype), rows_apart(5, 1, dtype)
    gate, up = both.chunk(2, -1)
    close(pointwise.silu_and_mul(gate, up, None), plain.silu_and_mul(gate, up))
    close(pointwise.silu_and_mul(gate, up, share), plain.silu_and_mul(gate, up) * torch.sigmoid(share))
    close(
        pointwise.clamped_swiglu(3 * gate, 3 * up, 1.5, 1.7), plain.clamped_swiglu(3 * gate, 3 * up, 1.5, 1.7)
    )
    x = torch.randn(5, 1030).to(DEVICE, dtype)
    wanted = x * torch.sigmoid(gate)
    assert pointwise.mul_sigmoid(x, gate) is x
    close(x, wanted)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "per_token"), [(128, 8), (32, 4), (5, 3), (60, 1)])
def test_routing(experts: int, per_token: int, renormalise: bool) -> None:
    torch.manual_seed(experts)
    logits = rows_apart(9, experts, torch.float32)
    weights, chosen = moe.route(logits, per_token, renormalise)
    wanted, numbers = plain_moe.route(logits, per_token, renormalise)
    assert torch.equal(chosen, numbers)
    close(weights, wanted)


def test_routing_ties_go_to_the_lowest_expert_and_nan_rows_to_real_ones() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [math.nan] * 5], device=DEVICE)
    _, chosen = moe.route(logits, 4, True)
    assert chosen[0].tolist() == [1, 2, 4, 0]
    assert sorted(chosen[1].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("renormalise", [True, False])
def test_tokens_that_are_not_live_take_no_experts(renormalise: bool) -> None:
    logits = torch.randn(5, 12, device=DEVICE)
    live = torch.tensor([True, False, True, True, False], device=DEVICE)
    weights, chosen = moe.route(logits, 3, renormalise, live)
    wanted, numbers = plain_moe.route(logits, 3, renormalise, live)
    assert torch.equal(chosen, numbers)
    assert (chosen[~live] == -1).all()
    assert torch.equal(chosen[live], plain_moe.route(logits, 3, renormalise)[1][live])
    torch.testing.assert_close(weights[live], wanted[live])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("num_heads", "kv_heads", "dim", "half"), [(4, 2, 16, 8), (3, 1, 20, 5)])
def test_heads_are_normed_turned_and_stored_in_one(
    num_heads: int, kv_heads: int, dim: int, half: int, normed: bool
) -> None:
    torch.manual_seed(dim)
    total, turned = num_heads + 2 * kv_heads, num_heads + kv_heads
    heads = rows_apart(3, total * dim, torch.float32).view(3, total, dim)
    weight = torch.rand(turned, dim, device=DEVICE) + 0.5 if normed else None
    angle = torch.rand(3, half, device=DEVICE) * 6
    store = torch.zeros(5, 2, 4, kv_heads, dim, device=DEVICE)
    page, offset = torch.tensor([4, -1, 1], device=DEVICE), torch.tensor([3, 0, 2], device=DEVICE)
    one_by_one = pointwise.norm_rotate(heads[:, :turned], weight, 1e-6, angle.cos(), angle.sin())
    expected = torch.zeros_like(store)
    key, value = one_by_one[:, num_heads:], heads[:, turned:]
    pages.write_kv(key, value, expected[:, 0], expected[:, 1], page, offset)
    arguments = (heads, num_heads, weight, 1e-6, angle.cos(), angle.sin())
    query = fused.store_heads(*arguments, store[:, 0], store[:, 1], page, offset, None)
    assert torch.equal(query, one_by_one[:, :num_heads])
    assert torch.equal(store, expected)
    packed = torch.zeros(2, *store.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.zeros(2, 5, 2, 4, kv_heads, device=DEVICE)
    fused.store_heads(
        *arguments, packed[0, :, 0], packed[0, :, 1], page, offset, (scales[0, :, 0], scales[0, :, 1])
    )
    pages.write_kv(
        key, value, packed[1, :, 0], packed[1, :, 1], page, offset, scales[1, :, 0], scales[1, :, 1]
    )
    assert torch.equal(packed[0].view(torch.uint8), packed[1].view(torch.uint8))
    assert torch.equal(scales[0], scales[1])
    assert scales[1].count_nonzero() == 4 * kv_heads
