"""Remembers experts that lost their place lately: those missed again show what a few more places would have saved."""

from __future__ import annotations

import torch

_LONG_AGO = -(1 << 40)


class Ghosts:
    """The ghosts of one model's experts, on the device, brought up to date once a step, in few operations: a GPU's host
    launches each of them.

    The last losses are remembered, as many as :meth:`step` was told; an expert that has a place again is none of them.

    Attributes:
        hits: [rows] int64, ghosts that decode steps wanted, in all steps up to the last but one.
    """

    def __init__(self, num_rows: int, num_experts: int, device: torch.device) -> None:
        """No expert has a place or has lost one."""
        shape = (num_rows, num_experts)
        self._resident = torch.zeros(shape, dtype=torch.bool, device=device)
        self._ghost = torch.zeros(shape, dtype=torch.bool, device=device)
        self._lost = torch.full(shape, _LONG_AGO, dtype=torch.int64, device=device)
        self._losses = torch.zeros((), dtype=torch.int64, device=device)
        self.hits = torch.zeros(num_rows, dtype=torch.int64, device=device)

    @property
    def num(self) -> torch.Tensor:
        """[] int64, ghosts now."""
        return self._ghost.sum()

    def tables(self) -> dict[str, torch.Tensor]:
        """The tables by the names that the fused kernel gives them."""
        return {
            "resident": self._resident,
            "ghost": self._ghost,
            "lost": self._lost,
            "losses": self._losses,
            "hits": self.hits,
        }

    def step(self, wanted: torch.Tensor, resident: torch.Tensor, remembered: torch.Tensor) -> None:
        """Between two steps.

        Args:
            wanted: [rows, experts] bool, what the decode rows of the step before chose.
            resident: the same shape, who has a place now: that step's evictions, and bans since, are done.
            remembered: [] int64, how many losses are remembered besides the last one.
        """
        self.hits += (wanted & self._ghost).sum(1)
        absent = ~resident
        gone = self._resident & absent
        number = gone.flatten().cumsum(0).view_as(self._lost)
        torch.where(gone, self._losses + number, self._lost, out=self._lost)
        self._losses += number[-1, -1]
        self._resident.copy_(resident)
        torch.logical_and(self._lost >= self._losses - remembered, absent, out=self._ghost)
