"""Linear layers in the packed layout and in the plain one."""

from __future__ import annotations

import pytest
import torch

from kernels._native import ops as native
from kernels.linear import Linear, aligned_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (32, 16), (33, 7), (100, 65)])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 21])
def test_linear(rows: int, columns: int, depth: int, biased: bool, stored: torch.dtype) -> None:
    weight, bias = torch.randn(columns, depth).to(stored).float(), torch.randn(columns) if biased else None
    wide = torch.randn(rows, depth + 5)
    x = wide[:, 3 : 3 + depth]
    expected = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0.0)
    torch.testing.assert_close(Linear(weight, bias)(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_other_dtypes_stay_plain() -> None:
    weight, x = torch.randn(5, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    assert Linear(weight)(x).dtype == torch.bfloat16
    assert torch.equal(Linear(weight)(x), torch.nn.functional.linear(x, weight))


def test_only_exact_weights_are_stored_short() -> None:
    weight = torch.randn(40, 9).bfloat16().float()
    assert native.pack_weight(weight).dtype == torch.bfloat16
    weight[3, 4] += 1e-4
    assert native.pack_weight(weight).dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_odd_numbers_of_rows_are_filled_up_and_cut_off(rows: int, biased: bool) -> None:
    weight = torch.randn(13, 16, device=DEVICE).bfloat16()
    bias = torch.randn(13, device=DEVICE).bfloat16() if biased else None
    wide, wide_bias = aligned_rows(weight, bias)
    assert wide.shape == (16, 16)
    x = torch.randn(rows, 16, device=DEVICE).bfloat16()
    filled = torch.nn.functional.linear(x, wide, wide_bias)
    assert not filled[:, 13:].any()
    found = Linear(weight, bias)(x)
    assert found.shape == (rows, 13)
    torch.testing.assert_close(found, filled[:, :13], rtol=2e-2, atol=2e-2)
    assert aligned_rows(wide, wide_bias)[0] is wide


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("columns", [96, 99])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_product_into_a_tensor_that_is_there(rows: int, columns: int, deterministic: bool) -> None:
    torch.manual_seed(rows + columns)
    weight = torch.randn(columns, 64, device=DEVICE).bfloat16()
    layer = Linear(weight, deterministic=deterministic)
    x, room = (
        torch.randn(rows, 64, device=DEVICE).bfloat16(),
        torch.zeros(7, columns, device=DEVICE).bfloat16(),
    )
    found = layer.into(x, room[1 : rows + 1])
    torch.testing.assert_close(found, layer(x))
    assert torch.equal(room[1 : rows + 1], found)
    assert not room[0].any()
    assert not room[rows + 1].any()
