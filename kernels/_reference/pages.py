"""Whole pages and single token rows of the arena in plain torch."""

from __future__ import annotations

import torch

FP8_LARGEST = 448.0
"""Largest finite value of float8_e4m3fn."""
FP8_RELATIVE_ERROR = 2.0**-4
"""Most by which a stored value differs, as a share of itself (three bits of mantissa, rounded to nearest); values under
2^-6 of their row's scale differ by at most 2^-10 of it."""


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


def write_scaled(
    rows: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor, page: torch.Tensor, offset: torch.Tensor
) -> None:
    """Rows [tokens, kv_heads, head_dim] in FP8, each with the scale that maps its largest magnitude to 448."""
    wide = rows.float()
    scale = (wide.abs().amax(-1) / FP8_LARGEST).clamp_(min=1e-12)
    scales[page, offset] = scale
    pages.view(torch.uint8)[page, offset] = (wide / scale.unsqueeze(-1)).to(pages.dtype).view(torch.uint8)
