"""The product of a few rows: its sums, its parts, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from kernels._triton.few_rows import Tiles, linear_few_rows, serves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize(("columns", "depth", "parts"), [(130, 256, 1), (64, 384, 3), (100, 640, 4)])
def test_sums_follow_the_plain_product(rows: int, columns: int, depth: int, parts: int) -> None:
    torch.manual_seed(rows + columns)
    x = torch.randn(rows, depth + 8, device=DEVICE).to(torch.float16)[:, :depth]
    weight = (torch.randn(columns, depth, device=DEVICE) / 8).to(torch.float16)
    bias = torch.randn(columns, device=DEVICE).to(torch.float16)
    exact = x.double() @ weight.double().T
    assert serves(x, weight)
    for _ in range(2):  # the counters of arrivals are ready again
        found = linear_few_rows(x, weight, None, Tiles(64, parts, 64, 3, 4))
        torch.testing.assert_close(found.double(), exact, atol=2e-2, rtol=2e-3)
    found = linear_few_rows(x, weight, bias, Tiles(64, parts, 64, 3, 4))
    torch.testing.assert_close(found.double(), exact + bias.double(), atol=2e-2, rtol=2e-3)
    torch.testing.assert_close(linear_few_rows(x, weight, None).double(), exact, atol=2e-2, rtol=2e-3)


def test_what_it_does_not_take() -> None:
    weight = torch.zeros(64, 256, dtype=torch.float16)
    assert not serves(torch.zeros(65, 256, dtype=torch.float16), weight)
    assert not serves(torch.zeros(4, 256), weight)
    assert not serves(torch.zeros(4, 264, dtype=torch.float16)[:, 8:], weight[:, :200])
    assert not serves(torch.zeros(256, 4, dtype=torch.float16).T, weight)
