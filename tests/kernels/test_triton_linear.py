"""The dense product of deterministic mode: right at odd sizes, and a row's bits the same in any company."""

from __future__ import annotations

import math

import pytest
import torch

from kernels._triton import linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(5, 96, 1100), (33, 40, 130), (1, 17, 64)]
if DEVICE == "cuda":
    SIZES += [(130, 5120, 2048), (7, 2048, 4096), (300, 333, 2500)]
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows", "width"), SIZES)
def test_the_product_is_right(tokens: int, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    store = torch.full((tokens, width + 16), math.nan, dtype=dtype, device=DEVICE)
    store[:, :width] = torch.randn(tokens, width).to(DEVICE, dtype)
    x = store[:, :width]
    weight, bias = torch.randn(rows, width).to(DEVICE, dtype), torch.randn(rows).to(DEVICE, dtype)
    for given in (None, bias):
        wanted = x.double() @ weight.double().t() + (0 if given is None else given.double())
        found = linear.linear(x, weight, given).double()
        error = (found - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width"), [(96, 1100)] + ([(5120, 2048), (1024, 7000)] if DEVICE == "cuda" else [])
)
def test_a_rows_bits_do_not_depend_on_the_batch(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    batches = (1, 2, 7, 64, 65, 200, 700) if DEVICE == "cuda" else (1, 2, 7, 65)
    x = torch.randn(max(batches), width).to(DEVICE, dtype)
    weight, bias = torch.randn(rows, width).to(DEVICE, dtype), torch.randn(rows).to(DEVICE, dtype)
    expected = linear.linear(x, weight, bias)
    for batch in batches:
        assert torch.equal(linear.linear(x[:batch], weight, bias), expected[:batch]), batch
    assert torch.equal(linear.linear(x.flip(0), weight, bias).flip(0), expected)


def test_parts_depend_on_the_weight_alone() -> None:
    assert linear.num_parts(5120, 2048) == 3
    assert linear.num_parts(2048, 4096) == 8
    assert linear.num_parts(151936, 2048) == 1
    assert linear.num_parts(64, 300) == 1
