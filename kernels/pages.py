"""Whole pages of the arena: copied and zeroed in place."""

from __future__ import annotations

import torch

from kernels._reference import pages as reference


def copy_pages(grid: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies pages inside one grid, as if all sources were read before the first target is written.

    Args:
        grid: [pages, page_bytes] uint8, a kind's whole page grid.
        sources, targets: [n] int64 physical page ids; targets are distinct.
    """
    reference.copy_pages(grid, sources, targets)


def zero_pages(grid: torch.Tensor, pages: torch.Tensor) -> None:
    """Zeroes ``pages`` [n] int64 of a grid [pages, page_bytes] uint8."""
    reference.zero_pages(grid, pages)
