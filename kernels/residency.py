"""Decides on the device which experts take places: the fused form of ``memory.device.residency`` for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels._reference import experts as reference

if TYPE_CHECKING:
    from kernels._triton.residency import ResidencyTables
    from kernels._triton.residency_step import GhostTables, StepScratch

__all__ = ["MAX_PAIRS", "FusedResidency", "FusedRules", "fused_residency", "gather"]

MAX_PAIRS = 1 << 16
"""Up to so many (token, choice) pairs one program looks at; a prefill pass leaves its more to tensor operations."""


@dataclass(frozen=True, slots=True)
class FusedRules:
    """What the kernels are told of the rules (``memory.device.residency_rules``) and of where places lie: place n at
    ``base`` + n * ``place_bytes``, whole lines of 128 bytes."""

    base: int
    place_bytes: int
    is_lru: bool
    freezes: bool
    decay: float
    recency: float
    frozen_margin: float
    thaw_share: float
    ghost_shift: int
    ranked: bool


class FusedResidency:
    """The kernels over one residency's tables."""

    def __init__(
        self, tables: ResidencyTables, ghosts: GhostTables, scratch: StepScratch, rules: FusedRules
    ) -> None:
        self._tables, self._ghosts, self._scratch, self._rules = tables, ghosts, scratch, rules

    def begin_step(self, step: int, num_stamping: int) -> None:
        """As ``Residency.begin_step``; two launches."""
        from kernels._triton import residency_step

        rules = self._rules
        residency_step.begin_step(
            self._tables, self._ghosts, self._scratch, step, num_stamping, rules.base, rules.place_bytes,
            rules.decay, rules.recency, rules.thaw_share, rules.ghost_shift, freezes=rules.freezes,
            is_lru=rules.is_lru,
        )  # fmt: skip

    def decide(
        self, row: int, experts: torch.Tensor, published: int, *, with_read: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Residency.decide`` (first answer), and ``with_read`` as ``Residency.decide_ahead``; one launch.
        ``experts``: at most MAX_PAIRS; ``published``: -1 for no row."""
        from kernels._triton import residency

        rules = self._rules
        return residency.decide(
            self._tables, row, experts, published, rules.base, rules.place_bytes, rules.recency,
            rules.frozen_margin, is_lru=rules.is_lru, ranked=rules.ranked, with_read=with_read,
        )  # fmt: skip

    def publish(self, row: int) -> None:
        """As ``Residency.publish``; one launch."""
        from kernels._triton import residency

        residency.publish(self._tables, row, self._rules.base, self._rules.place_bytes)


def fused_residency(
    tables: dict[str, torch.Tensor],
    ghosts: dict[str, torch.Tensor],
    rules: FusedRules,
    *,
    on_cpu: bool = False,
) -> FusedResidency | None:
    """The kernels over tables by the names of ``ResidencyTables`` and ``GhostTables``, where they lie on a GPU
    (``on_cpu``: or on a CPU, for Triton's interpreter), else None: there the tensor operations decide."""
    owner = tables["owner"]
    if not (owner.is_cuda or on_cpu) or len(tables["queue"]) == 0:
        return None
    from kernels._triton.residency import ResidencyTables
    from kernels._triton.residency_step import GhostTables, StepScratch

    rows, experts = ghosts["ghost"].shape
    marks = torch.zeros(2, experts, dtype=torch.int32, device=owner.device)
    scratch = StepScratch.make(rows, experts, owner.device)
    return FusedResidency(ResidencyTables(marks=marks, **tables), GhostTables(**ghosts), scratch, rules)


def gather(table: torch.Tensor, targets: torch.Tensor, num_bytes: int, programs: int = 0) -> None:
    """Copies the block at ``table[expert]`` to ``targets[expert]`` for every expert whose target is not 0, as
    :func:`kernels.experts.copy_blocks` does, for launches that mostly find little or nothing to do, and for those that
    leave the device to others meanwhile.

    Args:
        table, targets: [num_experts] int64 addresses, 128-byte aligned: device memory, or mapped host memory.
        num_bytes: of a block, a multiple of 128.
        programs: at most so many work at it, each a fraction of a processor's; 0: as many as bring one expert fastest.
    """
    if not table.is_cuda:
        reference.copy_blocks(table, targets, num_bytes)
        return
    from kernels._triton import residency_gather

    residency_gather.gather(table, targets, num_bytes, programs)
