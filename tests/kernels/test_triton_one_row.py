"""The product of one row against torch in float64, odd sizes and padding included."""

from __future__ import annotations

import math

import pytest
import torch

from kernels._triton.one_row import linear_one_row, serves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("columns", "depth"), [(1, 8), (129, 72), (257, 520), (1030, 1024), (5, 2880)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_row(columns: int, depth: int, has_bias: bool) -> None:
    torch.manual_seed(columns)
    store = torch.full((columns, depth + 16), math.nan, dtype=torch.bfloat16, device=DEVICE)
    weight = store[:, :depth]
    weight.copy_(torch.randn(columns, depth) * depth**-0.5)
    x = torch.randn(1, depth).to(DEVICE, torch.bfloat16)
    bias = torch.randn(columns).to(DEVICE, torch.bfloat16) if has_bias else None
    assert serves(x, weight)
    found = linear_one_row(x, weight, bias).double()
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert ((found - wanted).norm() / wanted.norm()).item() < 5e-3


def test_what_is_left_to_the_library() -> None:
    x, weight = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    assert serves(x, weight)
    assert not serves(x.repeat(2, 1), weight)
    assert not serves(x.float(), weight.float())
    assert not serves(x.float(), weight)
    assert not serves(x[:, ::2], weight[:, :32])
    assert not serves(x[:, :36], weight[:, :36])
