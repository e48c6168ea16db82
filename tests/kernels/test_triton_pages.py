"""Whole pages in Triton against plain torch: pages of one block and of several, few of them and many."""

from __future__ import annotations

import pytest
import torch

from kernels._reference import pages as reference
from kernels._triton import pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def grid_of(num_pages: int, page_bytes: int) -> torch.Tensor:
    """Random pages."""
    return torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8).to(DEVICE)


@pytest.mark.parametrize("page_bytes", [128, pages.COPY_BLOCK_BYTES, 3 * pages.COPY_BLOCK_BYTES + 256])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_pages_move_in_one_launch(page_bytes: int, count: int) -> None:
    """As many pages as blocks, fewer and more: neither may be taken for the other."""
    check_moves(page_bytes, count)


def test_more_pages_than_a_launch_has_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LAUNCH_PAGES", 4)
    check_moves(128, 9)
    check_copies(128, 9)


def check_moves(page_bytes: int, count: int) -> None:
    """Moves against the reference; -1 and nothing at all move nothing."""
    grid = grid_of(20, page_bytes)
    order = torch.randperm(20)
    sources, targets = order[:count].to(DEVICE), order[count : 2 * count].to(DEVICE)
    expected = grid.clone()
    reference.copy_pages(expected, sources, targets)
    pages.move_pages(grid, sources, targets)
    assert torch.equal(grid, expected)
    pages.move_pages(grid, targets, torch.full_like(targets, -1))
    pages.move_pages(grid, torch.full_like(targets, -1), sources)
    pages.move_pages(grid, sources[:0], targets[:0])
    assert torch.equal(grid, expected)


@pytest.mark.parametrize("page_bytes", [128, 3 * pages.COPY_BLOCK_BYTES + 256])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_pages_are_copied_and_zeroed(page_bytes: int, count: int) -> None:
    check_copies(page_bytes, count)


def check_copies(page_bytes: int, count: int) -> None:
    """Copies and zeroes against the reference."""
    grid = grid_of(20, page_bytes)
    order = torch.randperm(20)
    sources, targets = order[:count].to(DEVICE), order.roll(1)[:count].to(DEVICE)  # some are both
    expected = grid.clone()
    reference.copy_pages(expected, sources, targets)
    pages.copy_pages(grid, sources, targets)
    assert torch.equal(grid, expected)
    reference.zero_pages(expected, sources)
    pages.zero_pages(grid, sources)
    assert torch.equal(grid, expected)
