"""What an engine does for paged experts: plans their places at start, and puts their counters into snapshots."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memory.api import Ledger, LedgerError, PageSpec
from memory.ledger.ledger import ArenaLedger
from memory.ledger.prices import RecomputeCost
from worker.api import ModelInfo, WorkerSnapshot
from worker.config import WorkerConfig
from worker.errors import ConfigError
from worker.scheduling.statistics import PromptCost
from worker.scheduling.trading import ExpertTotals, ExpertTrader, PagedShape

if TYPE_CHECKING:
    from worker.experts.pager import ExpertPager
    from worker.experts.report import ExpertReport

log = logging.getLogger(__name__)

PRICED_MS_PER_TOKEN = RecomputeCost().ms_per_token
"""What the prefix tree takes a token to cost before any was measured."""


class EngineExperts:
    """The paged experts of one engine; :meth:`read` belongs to the loop's thread.

    Attributes:
        floor_places: places that requests' pages never take.
    """

    def __init__(
        self,
        pager: ExpertPager,
        config: WorkerConfig,
        info: ModelInfo,
        specs: Sequence[PageSpec],
        arena_bytes: int,
    ) -> None:
        """Logs the plan. ConfigError where the arena cannot hold ``expert_bytes``."""
        import torch

        from worker.experts.link import measure_link
        from worker.experts.plan import ArenaFacts, floor_places, plan_lines
        from worker.experts.report import ExpertReporter

        size = pager.host.place_bytes
        per_step = info.experts_per_token * len(pager.host.layers)
        self.floor_places = floor_places(config.expert_bytes, size, arena_bytes, per_step)
        if self.floor_places * size > arena_bytes:
            raise ConfigError(
                [f"expert_bytes={config.expert_bytes} does not fit the arena of {arena_bytes} bytes"]
            )
        facts = ArenaFacts(
            arena_bytes=arena_bytes,
            specs=specs,
            place_bytes=size,
            num_experts=info.num_experts * len(pager.host.layers),
            floor_places=self.floor_places,
            fixed_places=bool(config.expert_bytes),
            max_model_len=info.max_model_len,
            chunk_tokens=config.max_step_tokens,
        )
        for line in plan_lines(facts):
            log.info("%s", line)
        link = pager.link = pager.link or measure_link(pager.host, torch.device(info.device))
        log.info("experts: %s", link.line())
        self._pager = pager
        self._reporter = ExpertReporter(pager)
        self._report: ExpertReport | None = None
        self._trader: ExpertTrader | None = None
        self.clock: Callable[[], float] = time.monotonic
        """the seconds that rates are per"""
        self._trades = config.memory_mode == "arena" and not config.expert_bytes
        # A place is worth the reads over the link that it saves, at what they cost on this machine.
        self._shape = PagedShape(
            len(pager.host.layers), info.num_experts, info.experts_per_token, size, link.bytes_per_s
        )

    def audit(self) -> None:
        """Proves, between steps, that addresses and owners are a bijection and banned places have no owner; raises
        LedgerError if not. Waits for the device."""
        problems = self._pager.residency.audit()
        if problems:
            raise LedgerError(f"expert places: {'; '.join(problems)}")

    def read(self) -> ExpertReport:
        """The counters now (on a GPU: as the last copy brought them)."""
        self._report = self._reporter.read()
        return self._report

    def trade(self, ledger: Ledger, num_running: int, prompts: PromptCost) -> None:
        """Lets spare bytes flow between experts and kept prefixes, by what ``read`` last saw. Nothing flows where one
        side's bytes are fixed: ``memory_mode=split``, or ``expert_bytes``. ``prompts``: what they cost here."""
        from memory.device.residency import Lane

        if self._report is None or not self._trades or not isinstance(ledger, ArenaLedger):
            return
        if self._trader is None:
            self._trader = ExpertTrader(ledger, self._shape)
        report = self._report
        staged = report.total(Lane.PREFILL_IN_PLACE) + report.total(Lane.STAGED)
        totals = ExpertTotals(
            report.misses + staged, staged, report.ghost_hits, report.num_ghosts, sum(report.resident)
        )
        scale = prompts.ms_per_token / PRICED_MS_PER_TOKEN or 1.0
        self._trader.trade(self.clock(), totals, num_running, scale, prompts.busy_s)


def with_experts(snapshot: WorkerSnapshot, report: ExpertReport) -> WorkerSnapshot:
    """The snapshot with experts' counters and residency. The residency is whole each time: 768 bytes for 48 x 128."""
    from memory.device.residency import Lane

    return replace(
        snapshot,
        expert_hits=report.hits,
        expert_misses=report.misses,
        expert_bytes_paged=report.lane_bytes(Lane.TEE, Lane.IN_PLACE),
        experts=report.residency,
        extra={**snapshot.extra, **report.extra()},
    )


def report_json(report: ExpertReport | None) -> dict[str, Any] | None:
    """What ``GET /experts`` answers; None where experts are resident."""
    return None if report is None else report.as_json()
