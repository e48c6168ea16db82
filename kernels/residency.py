"""Decides on the device which experts take places: the fused form of ``memory.device.residency`` for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels._triton.residency import ResidencyTables

MAX_PAIRS = 4096
"""Up to so many (token, choice) pairs one program looks at; a prefill leaves its thousands to tensor operations."""


def fused_tables(tables: dict[str, torch.Tensor]) -> ResidencyTables | None:
    """The kernels' view of the tables where they lie on a GPU, else None: there the tensor operations decide."""
    if not tables["owner"].is_cuda:
        return None
    from kernels._triton.residency import ResidencyTables

    return ResidencyTables(**tables)


def decide(
    tables: ResidencyTables,
    row: int,
    experts: torch.Tensor,
    stamping: torch.Tensor,
    base: int,
    place_bytes: int,
    recency: float,
    frozen_margin: float,
    *,
    is_lru: bool,
) -> torch.Tensor:
    """One layer's decision; arguments and answer as those of ``Residency.decide``.

    Args:
        tables: the residency's.
        row: of the layer. experts: [tokens, experts_per_token] int64, at most MAX_PAIRS; stamping: [tokens] bool.
        base, place_bytes: address of the first place and bytes from one to the next.
        recency, frozen_margin: constants of the rules.
    """
    from kernels._triton import residency

    return residency.decide(
        tables, row, experts, stamping, base, place_bytes, recency, frozen_margin, is_lru=is_lru
    )


def publish(tables: ResidencyTables, row: int, base: int, place_bytes: int) -> None:
    """Enters the owners and addresses of what the layer's :func:`decide` gave places."""
    from kernels._triton import residency

    residency.publish(tables, row, base, place_bytes)
