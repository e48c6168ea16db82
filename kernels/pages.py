"""Whole pages of the arena: copied and zeroed in place."""

from __future__ import annotations

import torch

from kernels._reference import pages as reference


def copy_pages(grid: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies pages inside one grid, as if all sources were read before the first target is written.

    Args:
        grid: [pages, page_bytes] uint8, a kind's whole page grid.
        sources, targets: [n] int64 physical page ids; targets are distinct. On a GPU -1 on either side skips the pair.
    """
    if grid.is_cuda:
        from kernels._triton import pages as on_gpu

        on_gpu.copy_pages(grid, sources, targets)
        return
    reference.copy_pages(grid, sources, targets)


def move_pages(grid: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies pages inside one grid in one launch and without memory of its own, in no order.

    Args:
        grid: [pages, page_bytes] uint8, a kind's whole page grid.
        sources, targets: [n] int64 physical page ids; targets are distinct, and none is a source. On a GPU -1 on
            either side skips the pair.
    """
    if grid.is_cuda:
        from kernels._triton import pages as on_gpu

        on_gpu.move_pages(grid, sources, targets)
        return
    reference.copy_pages(grid, sources, targets)


def zero_pages(grid: torch.Tensor, pages: torch.Tensor) -> None:
    """Zeroes ``pages`` [n] int64 of a grid [pages, page_bytes] uint8; on a GPU -1 is skipped."""
    if grid.is_cuda:
        from kernels._triton import pages as on_gpu

        on_gpu.zero_pages(grid, pages)
        return
    reference.zero_pages(grid, pages)
