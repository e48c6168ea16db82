"""Linear layers in the packed layout and in the plain one."""

from __future__ import annotations

import pytest
import torch

from kernels._native import ops as native
from kernels.linear import Linear


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
