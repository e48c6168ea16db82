"""Whole pages and single token rows of the arena in plain torch."""

from __future__ import annotations

import torch


def copy_pages(grid: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """``grid[targets] = grid[sources]`` as if all sources were read first."""
    grid.index_copy_(0, targets, grid.index_select(0, sources))


def zero_pages(grid: torch.Tensor, pages: torch.Tensor) -> None:
    """``grid[pages] = 0``."""
    grid.index_fill_(0, pages, 0)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """``pages[page[t], offset[t]] = row[t]`` for keys and values."""
    key_pages[page, offset] = key.to(key_pages.dtype)
    value_pages[page, offset] = value.to(value_pages.dtype)
