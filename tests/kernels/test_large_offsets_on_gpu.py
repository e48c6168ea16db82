"""Kernels that address pages, past 2^31 elements: the same numbers as on pages near the buffer's start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.kv import store_heads, write_kv
from kernels.pages import copy_pages, move_pages, zero_pages
from kernels.recurrent import (
    causal_conv_rows,
    causal_conv_step,
    chunk_layout,
    delta_rule_chunks,
    delta_rule_step,
)

pytestmark = pytest.mark.gpu

STEP = (1 << 31) + 4096
"""Elements from page 0 to page 1: an offset in 32 bits would land elsewhere."""
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def store() -> Iterator[torch.Tensor]:
    """Room for two pages of up to 2^20 float32 elements each, STEP apart."""
    yield torch.zeros(STEP + (1 << 20), device=CUDA)
    torch.cuda.empty_cache()


def pages_of(store: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2, *shape] with page 1 at element STEP."""
    strides = torch.empty(shape, device="meta").stride()
    return torch.as_strided(store.view(dtype), (2, *shape), (STEP, *strides))


def test_more_pages_move_than_a_launch_has() -> None:
    grid = torch.arange(2 * 70_000, device=CUDA).unsqueeze(1).expand(-1, 16).contiguous().view(torch.uint8)
    sources, targets = torch.arange(140_000, device=CUDA).chunk(2)
    move_pages(grid, sources, targets)
    assert torch.equal(grid[:70_000], grid[70_000:])
    copy_pages(grid, targets, sources.flip(0))
    assert torch.equal(grid[:70_000], grid[70_000:].flip(0))
    zero_pages(grid, targets)
    assert not grid[70_000:].any()
    assert grid[:70_000].any()


def test_states_advance(store: torch.Tensor) -> None:
    torch.manual_seed(0)
    states, columns = pages_of(store, 2, 16, 32), pages_of(store, 3, 96)
    query, key = (torch.randn(3, 1, 16, device=CUDA) / 4 for _ in range(2))
    value, x = torch.randn(3, 2, 32, device=CUDA), torch.randn(3, 96, device=CUDA)
    decay, beta, weight = (
        torch.rand(3, 2, device=CUDA),
        torch.rand(3, 2, device=CUDA),
        torch.randn(4, 96, device=CUDA),
    )
    layout = chunk_layout([3], 4, CUDA)
    answers = []
    for number in (0, 1):
        page = torch.tensor([number], device=CUDA)
        states[number] = 0.5
        one = delta_rule_step(query[:1], key[:1], value[:1], decay[:1], beta[:1], states, page)
        many = delta_rule_chunks(query, key, value, decay.log(), beta, states, page, layout, decay)
        kept = states[number].clone()
        columns[number] = 0.25
        turned = [
            causal_conv_step(x[:1], weight, columns, page),
            causal_conv_rows(x, weight, columns, page, layout),
        ]
        answers.append([one, many, kept, *turned, columns[number].clone()])
    for near, far in zip(*answers, strict=True):
        assert torch.equal(near, far)
        assert near.abs().sum() > 0


def test_rows_are_written(store: torch.Tensor) -> None:
    torch.manual_seed(1)
    pages = pages_of(store, 4, 2, 64)
    heads = torch.randn(2, 8, 64, device=CUDA)
    turn = torch.rand(2, 32, device=CUDA)
    for number in (0, 1):
        pages[number] = 0
        page, offset = torch.tensor([number, -1], device=CUDA), torch.tensor([3, 0], device=CUDA)
        write_kv(heads[:, :2], heads[:, 2:4], pages[:, :2], pages[:, 2:], page, offset - 2)
        assert torch.equal(pages[number, 1], heads[0, :2])
        assert torch.equal(pages[number, 3], heads[0, 2:4])
        store_heads(heads.clone(), 4, None, 0.0, turn, turn, pages[:, :2], pages[:, 2:], page, offset - 3)
        assert torch.equal(pages[number, 2], heads[0, 6:])
        assert pages[number, 0].abs().sum() > 0


def test_pages_are_copied_and_zeroed() -> None:
    grid = torch.zeros(3, (1 << 30) + 128, dtype=torch.uint8, device=CUDA)  # page 2 begins past 2^31 bytes
    grid[0] = 7
    copy_pages(grid, torch.tensor([0, -1], device=CUDA), torch.tensor([2, 1], device=CUDA))
    assert int(grid[2].sum(dtype=torch.int64)) == 7 * grid.shape[1]
    assert not grid[1].any()
    zero_pages(grid, torch.tensor([2, -1], device=CUDA))
    assert not grid[2].any()
    assert bool((grid[0] == 7).all())
