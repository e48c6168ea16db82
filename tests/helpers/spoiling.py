"""Spoils a paged model's host store behind its hashes, for tests of what a comparison with a reference sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from worker.experts.pager import ExpertPager
from worker.models.paged import PagedFactory


def spoiled(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[ExpertPager], None]) -> None:
    """Spoils the host store when a paged model has been read. The hashes go with it: what is tried is what the
    comparison sees, not what the running check does."""
    finish = PagedFactory.finish

    def spoiling(self: PagedFactory, device: torch.device) -> ExpertPager:
        pager = finish(self, device)
        spoil(pager)
        for layer in pager.host.layers:
            for expert in range(pager.host.num_experts):
                pager.host.seal(layer, expert)
        return pager

    monkeypatch.setattr(PagedFactory, "finish", spoiling)
