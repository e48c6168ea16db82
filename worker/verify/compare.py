"""Compares teacher-forced log-probabilities of paged experts, at three numbers of places, with resident ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from memory.device.residency import Lane, ResidencyRules
from worker.config import WorkerConfig
from worker.errors import ConfigError, EngineDead
from worker.execution.runner import ModelRunner
from worker.experts.pager import PagerOptions
from worker.models.paged import PagedFactory
from worker.scheduling.ledgers import make_ledger
from worker.verify.forcing import TeacherForced
from worker.verify.probe import PagingProbe, Parting, find_parting
from worker.verify.reference import Reference, ResidentReference


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far paged may be from resident: mean and largest difference of log-probabilities, and the relative error of
    one layer's experts at which the layer is named."""

    mean: float
    largest: float
    layer: float


TOLERANCES = {
    "float32": Tolerance(1e-4, 1e-2, 1e-3),
    "bfloat16": Tolerance(2e-2, 1.0, 3e-2),
    "float16": Tolerance(5e-3, 0.3, 1e-2),
}


_CHECKED_PLACES = 64
"""Places per step whose content is compared with its hash: many, since a verification is short."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way of paging to be verified: ``share`` of the experts in places, churning (least recently used, never
    frozen) or by the rules that serve."""

    share: float
    churns: bool


CASES = (Case(0.25, churns=True), Case(0.4, churns=False), Case(0.8, churns=False))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case's result over ``num_tokens`` scored tokens; ``parting`` where layers differ, ``corrupt`` what the
    running check found."""

    case: Case
    num_places: int
    num_tokens: int
    mean: float
    largest: float
    hits: int
    misses: int
    evictions: int
    parting: Parting | None
    corrupt: str

    def passes(self, tolerance: Tolerance) -> bool:
        """Whether the case is sound. A NaN is not."""
        close = self.mean <= tolerance.mean and self.largest <= tolerance.largest
        return close and self.parting is None and not self.corrupt

    def line(self, tolerance: Tolerance) -> str:
        """The result in words."""
        kind = "churning" if self.case.churns else "serving rules"
        words = (
            f"{'ok  ' if self.passes(tolerance) else 'FAIL'} {self.num_places} places ({self.case.share:.0%}, {kind}):"
            f" mean {self.mean:.2e}, largest {self.largest:.2e} over {self.num_tokens} tokens;"
            f" {self.hits} hits, {self.misses} misses, {self.evictions} evictions"
        )
        if self.parting is not None:
            named = ", ".join(str(expert) for expert in self.parting.experts) or "none alone"
            words += (
                f"; first differs in layer {self.parting.layer}, expert {named}"
                f" (relative error {self.parting.relative_error:.2e})"
            )
        return words + (f"; {self.corrupt}" if self.corrupt else "")


class Verifier:
    """Runs cases against a reference."""

    def __init__(
        self,
        config: WorkerConfig,
        prompts: Sequence[Sequence[int]],
        arena_bytes: int,
        reference: Reference | None = None,
    ) -> None:
        """``prompts``: token ids, at least three each. ``reference``: None loads the resident one. ConfigError for a
        model without routed experts."""
        self._config = replace(
            config, experts="paged", expert_bytes=0, prefix_cache=False, arena_bytes=arena_bytes
        )
        self._prompts = prompts
        self._arena_bytes = arena_bytes
        self._reference = ResidentReference(config, arena_bytes) if reference is None else reference
        if not self._reference.info.num_experts:
            raise ConfigError(
                [f"{config.model}: this model has no routed experts; there is nothing to verify"]
            )
        self.tolerance = TOLERANCES[self._reference.info.dtype]

    def run(self, case: Case) -> Outcome:
        """One case, step by step beside the reference."""
        # Asked for ahead of the paged model: a streamed reference is done, and its memory free, when that is loaded.
        expected = self._reference.steps(self._prompts)
        rules = ResidencyRules("lru", freezes=False) if case.churns else ResidencyRules()
        info = self._reference.info
        probe = PagingProbe(PagedFactory(PagerOptions(rules=rules, checked_places=_CHECKED_PLACES)))
        runner = ModelRunner(self._config, probe)
        pager = runner.pager
        assert pager is not None
        every = info.num_experts * len(pager.host.layers)
        places = max(info.experts_per_token, round(case.share * every))
        pager.limit_places(places)
        runner.attach_memory(runner.page_specs, self._arena_bytes)
        ledger = make_ledger(self._config, runner.page_specs, self._arena_bytes, places)
        parting: Parting | None = None
        differences: list[np.ndarray] = []
        plans = TeacherForced(ledger).plans(self._prompts)
        for step, plan in zip(expected, plans, strict=True):
            probe.seen.clear()
            found = torch.log_softmax(runner.score(plan), -1)
            likely = step.likely.to(found.device)
            gap = (step.logprobs.to(found.device) - found.gather(1, likely)).abs()
            differences.append(gap.cpu().numpy())
            if parting is None:
                parting = find_parting(step.seen, self._reference, probe, self.tolerance.layer)
        corrupt = ""
        try:
            pager.raise_if_corrupt()
        except EngineDead as error:
            corrupt = str(error)
        counts = pager.residency.counts.sum(1).tolist()
        every_gap = np.concatenate(differences)
        return Outcome(
            case=case,
            num_places=pager.num_places,
            num_tokens=len(every_gap),
            mean=float(every_gap.mean()),
            largest=float(every_gap.max()),
            hits=counts[Lane.HIT],
            misses=counts[Lane.TEE] + counts[Lane.IN_PLACE],
            evictions=counts[Lane.EVICTED],
            parting=parting,
            corrupt=corrupt,
        )
