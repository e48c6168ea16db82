"""Chooses the ledger: the one place where a worker's configuration meets the book of pages."""

from __future__ import annotations

from collections.abc import Sequence

from memory.api import Ledger, PageSpec
from memory.ledger.free_lists import FreeListLedger
from worker.config import WorkerConfig


def make_ledger(config: WorkerConfig, specs: Sequence[PageSpec], arena_bytes: int) -> Ledger:
    """The ledger of one worker over ``arena_bytes`` bytes."""
    return FreeListLedger(specs, arena_bytes, config.max_running, config.max_step_tokens, config.split_ratio)
