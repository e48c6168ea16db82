"""Norms, rotary embedding, gated activations, MXFP4 and page rows against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.kv import write_kv
from kernels.mxfp4 import dequantize_mxfp4
from kernels.pages import copy_pages, zero_pages
from kernels.pointwise import (
    GatedActivation,
    add_norm,
    gated_norm,
    l2_norm,
    mul_sigmoid,
    rms_norm,
    rotate,
    silu_and_mul,
)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("shape", [(1, 7), (5, 256), (3, 4, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    kept = x.clone()
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6),
        expected.to(dtype),
        rtol=1e-5 if dtype == torch.float32 else 1e-2,
        atol=1e-5,
    )
    assert torch.equal(x, kept)


@pytest.mark.usefixtures("twins")
def test_norms_of_zeros_are_zeros() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()
    assert l2_norm(torch.zeros(2, 8)).eq(0).all()


@pytest.mark.usefixtures("twins")
def test_l2_norm() -> None:
    x = torch.randn(3, 2, 17)
    torch.testing.assert_close(l2_norm(x), x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt())


@pytest.mark.usefixtures("twins")
def test_rotate_turns_planes_of_halves_and_leaves_the_rest() -> None:
    x = torch.randn(5, 3, 20)
    angle = torch.randn(5, 6)
    out = rotate(x.clone(), angle.cos(), angle.sin())
    for i in range(6):
        low, high = x[..., i], x[..., i + 6]
        cos, sin = angle[:, i : i + 1].cos(), angle[:, i : i + 1].sin()
        torch.testing.assert_close(out[..., i], low * cos - high * sin)
        torch.testing.assert_close(out[..., i + 6], high * cos + low * sin)
    assert torch.equal(out[..., 12:], x[..., 12:])


@pytest.mark.usefixtures("twins")
def test_gated_activations() -> None:
    gate, up = torch.randn(4, 9) * 3, torch.randn(4, 9) * 3
    kept = gate.clone(), up.clone()
    torch.testing.assert_close(silu_and_mul(gate, up), gate * gate.sigmoid() * up)
    cut = gate.clamp(max=2.0)
    expected = (up.clamp(-2.0, 2.0) + 1) * cut * (1.702 * cut).sigmoid()
    torch.testing.assert_close(GatedActivation(2.0, 1.702)(gate, up), expected)
    assert torch.equal(gate, kept[0])
    assert torch.equal(up, kept[1])


def test_mxfp4_by_its_definition() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.tensor([[0, 1, 100, 126, 127, 128, 150, 254], [127] * 8], dtype=torch.uint8)
    out = dequantize_mxfp4(blocks, scales)
    assert out.shape == (2, 256)
    for row, group, place in ((0, 3, 5), (1, 0, 0), (1, 7, 15), (0, 0, 15), (0, 7, 1)):
        byte = int(blocks[row, group, place])
        for nibble, column in ((byte & 15, 0), (byte >> 4, 1)):
            exponent, mantissa = (nibble >> 1) & 3, nibble & 1
            size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            expected = (-size if nibble & 8 else size) * 2.0 ** (int(scales[row, group]) - 127)
            assert out[row, group * 32 + 2 * place + column].item() == torch.tensor(expected).float().item()


@pytest.mark.usefixtures("twins")
def test_kv_rows_land_in_their_slots_only() -> None:
    buffer = torch.full((6, 3, 4, 2, 8), math.nan)
    key, value = torch.randn(5, 7, 8)[:, 2:4], torch.randn(5, 2, 8)
    page, offset = torch.tensor([5, 0, 0, 3, 3]), torch.tensor([3, 0, 1, 2, 0])
    write_kv(key, value, buffer[:, 0], buffer[:, 2], page, offset)
    assert torch.equal(buffer[page, 0, offset], key)
    assert torch.equal(buffer[page, 2, offset], value)
    assert int(buffer.isnan().sum()) == buffer.numel() - 2 * key.numel()


def test_pages_are_copied_as_if_read_first() -> None:
    grid = torch.arange(5, dtype=torch.uint8).unsqueeze(1).repeat(1, 130)
    copy_pages(grid, torch.tensor([0, 1, 4]), torch.tensor([1, 0, 3]))
    assert grid[:, 7].tolist() == [1, 0, 2, 4, 4]
    zero_pages(grid, torch.tensor([3]))
    assert grid.sum(1).tolist() == [130, 0, 260, 0, 520]


@pytest.mark.usefixtures("twins")
def test_heads_have_norm_weights_of_their_own_and_may_be_part_of_wider_rows() -> None:
    wide = torch.randn(4, 5 * 12)
    x, weight = wide[:, 12:48].view(4, 3, 12), torch.randn(3, 12)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
    kept, angle = wide.clone(), torch.randn(4, 4)
    rotate(x, angle.cos(), angle.sin())
    assert torch.equal(wide[:, :12], kept[:, :12])
    assert torch.equal(wide[:, 48:], kept[:, 48:])
    torch.testing.assert_close(
        x[:, :, 0], kept[:, [12, 24, 36]] * angle.cos()[:, :1] - kept[:, [16, 28, 40]] * angle.sin()[:, :1]
    )


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_expert_weighs_its_activation(dtype: torch.dtype) -> None:
    wide = torch.randn(5, 1 + 2 * 19).to(dtype) * 4
    share, gate, up = wide[:, :1], wide[:, 1:20], wide[:, 20:]
    expected = gate.float() * gate.float().sigmoid() * up.float() * share.float().sigmoid()
    rtol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(silu_and_mul(gate, up, share).float(), expected, rtol=rtol, atol=rtol)


@pytest.mark.usefixtures("twins")
def test_gates_multiply_by_their_sigmoid() -> None:
    x, gate = torch.randn(3, 21), torch.randn(3, 40)[:, 11:32] * 30
    torch.testing.assert_close(mul_sigmoid(x.clone(), gate), x * gate.sigmoid())


@pytest.mark.usefixtures("twins")
def test_gated_norm_norms_each_head_before_its_gate() -> None:
    x, gate, weight = torch.randn(3, 2, 21), torch.randn(3, 50)[:, 3:45], torch.randn(21)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    expected = normed * (gate * gate.sigmoid()).view(3, 2, 21)
    torch.testing.assert_close(gated_norm(x.clone(), gate, weight, 1e-6), expected.flatten(1))
    room = torch.empty(3, 42)
    assert gated_norm(x.clone(), gate, weight, 1e-6, room) is room
    torch.testing.assert_close(room, expected.flatten(1))


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_adds_in_place_and_norms_the_sum(dtype: torch.dtype) -> None:
    x, y, weight = torch.randn(3, 21).to(dtype), torch.randn(3, 21).to(dtype), torch.randn(21)
    added = x + y
    out = add_norm(x, y, weight, 1e-6)
    assert torch.equal(x, added)
    torch.testing.assert_close(out, rms_norm(added, weight, 1e-6))
